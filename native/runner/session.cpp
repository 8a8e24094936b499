#include "session.h"

#include "error.h"
#include "measure.h"

namespace tvm_fuse {

Session::Session(Package package, int device, const std::string& driver, const std::string& image)
    : package_(std::move(package)), device_(device, driver), is_set_(bundle().inputs.size(), false) {
  const ChosenImage chosen = load_image(package_, image, device_.info().arch);
  const Device::Current current(device_);
  network_ = std::make_unique<Network>(device_, bundle(), chosen.data);
  const auto parameters = load_parameters(package_);
  for (size_t i = 0; i < parameters.size(); ++i) network_->set(bundle().parameters[i], parameters[i].data());
  package_.files.clear();
  package_.owned.clear();
}

Session::~Session() {
  try {
    const Device::Current current(device_);
    graph_.reset();
    network_.reset();
  } catch (const Error&) {  // the context is lost, and all memory with it
  }
}

const Port& Session::port(const std::vector<Port>& ports, size_t index, const char* what) const {
  if (index >= ports.size())
    throw Error(Status::kUsage, bundle().model + ": there is no " + what + " " + std::to_string(index) + " of " +
                                    std::to_string(ports.size()));
  return ports[index];
}

void Session::check_copy(const Port& port, const void* data, size_t size_bytes) const {
  const Tensor& tensor = bundle().tensors[port.tensor];
  if (size_bytes != tensor.size_bytes())
    throw Error(Status::kUsage, quote(port.name) + ": wanted " + std::to_string(tensor.size_bytes()) + " bytes (" +
                                    tensor.text() + "), got " + std::to_string(size_bytes));
  if (data == nullptr && size_bytes != 0) throw Error(Status::kUsage, quote(port.name) + ": the address is NULL");
}

void Session::set_input(size_t index, const void* data, size_t size_bytes) {
  const Port& input = port(bundle().inputs, index, "input");
  check_copy(input, data, size_bytes);
  const Device::Current current(device_);
  network_->set(input, data);
  is_set_[index] = true;
}

void Session::run() {
  for (size_t i = 0; i < is_set_.size(); ++i)
    if (!is_set_[i]) throw Error(Status::kUsage, quote(bundle().inputs[i].name) + ": the input was never set");
  const Device::Current current(device_);
  if (graph_ != nullptr) {
    graph_->launch();
    return device_.synchronize("CUDA graph");
  }
  network_->run();
  device_.synchronize();
  if (has_run_) return;
  has_run_ = true;
  try {  // all kernels are loaded now, so that nothing but launches is captured
    graph_ = std::make_unique<Graph>(device_, [this] { network_->run(); });
  } catch (const CudaError&) {  // launches do the same, a little slower
  }
}

void Session::get_output(size_t index, void* data, size_t size_bytes) {
  const Port& output = port(bundle().outputs, index, "output");
  check_copy(output, data, size_bytes);
  if (!has_run_) throw Error(Status::kUsage, quote(output.name) + ": nothing was run yet");
  const Device::Current current(device_);
  network_->get(output, data);
}

}  // namespace tvm_fuse
