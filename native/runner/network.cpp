#include "network.h"

#include <cstring>
#include <set>

namespace tvm_fuse {
namespace {

constexpr uint8_t kPoison = 0xff;  // as float32 or float16 no number

template <class T>
uint64_t bits_of(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);  // the first bytes, which are what a kernel reads
  return bits;
}

}  // namespace

Network::Network(Device& device, const Bundle& bundle, Bytes image) : device_(device), bundle_(bundle) {
  module_ = device.load_module(image);
  try {
    allocate();
    prepare();
  } catch (...) {
    release();
    throw;
  }
}

Network::~Network() { release(); }

void Network::release() noexcept {
  for (const CudaAddress address : storages_) device_.free(address);
  if (arena_ != 0) device_.free(arena_);
  device_.unload_module(module_);
}

void Network::allocate() {
  storages_.reserve(bundle_.storages.size());
  for (const size_t size : bundle_.storages) storages_.push_back(device_.allocate(size));
  arena_ = device_.allocate(bundle_.arena_bytes());
}

void Network::prepare() {
  std::vector<CudaHandle> functions;
  for (const Kernel& kernel : bundle_.kernels) functions.push_back(device_.find_kernel(module_, kernel));
  for (const Operator& node : bundle_.operators) {
    for (const Call& call : node.calls) {
      const Kernel& kernel = bundle_.kernels[call.kernel];
      std::vector<uint64_t> values;
      for (size_t i = 0; i < call.operands.size(); ++i)
        values.push_back(value_of(kernel.parameters[i], call.operands[i]));
      steps_.push_back({node.name, PreparedLaunch(kernel, functions[call.kernel], std::move(values))});
    }
  }
}

uint64_t Network::value_of(const Parameter& parameter, const Operand& operand) const {
  if (operand.kind == Operand::Kind::kTensor) return address_of(operand.index);
  if (operand.kind == Operand::Kind::kWorkspace) return arena_ + bundle_.workspaces[operand.index].offset_bytes;
  const Number& number = operand.immediate;
  if (parameter.dtype->kind != 'f') return bits_of(number.integer);
  if (parameter.dtype->size_bytes == 2) return bits_of(to_half(number.real));
  return parameter.dtype->size_bytes == 4 ? bits_of(static_cast<float>(number.real)) : bits_of(number.real);
}

void Network::set(const Port& port, const void* data) {
  device_.upload(address_of(port.tensor), data, bundle_.tensors[port.tensor].size_bytes());
}

void Network::get(const Port& port, void* data) {
  device_.download(data, address_of(port.tensor), bundle_.tensors[port.tensor].size_bytes());
}

void Network::poison() {
  std::set<size_t> kept;
  for (const auto* ports : {&bundle_.inputs, &bundle_.parameters})
    for (const Port& port : *ports) kept.insert(bundle_.tensors[port.tensor].storage);
  for (size_t i = 0; i < storages_.size(); ++i)
    if (kept.count(i) == 0) device_.fill(storages_[i], kPoison, bundle_.storages[i]);
  device_.fill(arena_, kPoison, bundle_.arena_bytes());
}

void Network::run() {
  for (const Step& step : steps_) device_.launch(step.launch);
}

void Network::run_checked() {
  for (const Step& step : steps_) {
    device_.launch(step.launch);
    device_.synchronize(step.launch.kernel->symbol);
  }
}

}  // namespace tvm_fuse
