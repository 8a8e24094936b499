#include "bundle_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "error.h"

namespace tvm_fuse {
namespace {

using std::to_string;

class Check {
 public:
  Check(const Bundle& bundle, const std::string& where) : bundle_(bundle), where_(where) {}

  void all() const {
    memory();
    ports();
    for (const Operator& node : bundle_.operators)
      for (const Call& call : node.calls) check_call(node, call);
    files();
    draws();
  }

 private:
  void require(bool holds, const std::string& fault) const {
    if (!holds) throw damaged(where_ + ": the bundle is damaged: " + fault);
  }

  void memory() const {
    size_t total = bundle_.arena_bytes();
    for (const size_t size : bundle_.storages)
      require(!__builtin_add_overflow(total, size, &total), "its storages have more than 2^64 bytes");
    for (size_t i = 0; i < bundle_.tensors.size(); ++i) {
      const Tensor& tensor = bundle_.tensors[i];
      const std::string name = "tensor " + to_string(i);
      require(tensor.storage < bundle_.storages.size(), name + " lies in storage " + to_string(tensor.storage) +
                                                            " of " + to_string(bundle_.storages.size()));
      const size_t wanted = tensor.size_bytes(), got = bundle_.storages[tensor.storage];
      require(wanted <= got, name + " has " + to_string(wanted) + " bytes, its storage " + to_string(got));
    }
  }

  void ports() const {
    std::vector<Port> fed = bundle_.inputs;
    fed.insert(fed.end(), bundle_.parameters.begin(), bundle_.parameters.end());
    check_ports("inputs or parameters", fed);
    check_ports("outputs", bundle_.outputs);
    require(!bundle_.outputs.empty(), "it has no output");
  }

  void check_ports(const std::string& what, const std::vector<Port>& ports) const {
    std::set<std::string> names;
    for (const Port& port : ports) {
      require(names.insert(port.name).second, "two " + what + " are called " + quote(port.name));
      require(port.tensor < bundle_.tensors.size(), quote(port.name) + " is tensor " + to_string(port.tensor) +
                                                        " of " + to_string(bundle_.tensors.size()));
    }
  }

  void check_call(const Operator& node, const Call& call) const {
    const Kernel& kernel = bundle_.kernels[call.kernel];
    const size_t wanted = kernel.parameters.size();
    require(call.operands.size() == wanted, node.name + " passes " + to_string(call.operands.size()) + " of " +
                                                to_string(wanted) + " parameters to " + kernel.symbol);
    for (size_t i = 0; i < wanted; ++i) {
      const std::string fault = find_fault(kernel.parameters[i], call.operands[i]);
      require(fault.empty(),
              node.name + " passes " + fault + " for " + quote(kernel.parameters[i].name) + " to " + kernel.symbol);
    }
  }

  std::string find_fault(const Parameter& parameter, const Operand& operand) const {
    if (operand.kind == Operand::Kind::kImmediate) {
      if (parameter.is_pointer) return "a number";
      return holds(*parameter.dtype, operand.immediate) ? "" : "no " + std::string(parameter.dtype->name);
    }
    const bool is_tensor = operand.kind == Operand::Kind::kTensor;
    const size_t count = is_tensor ? bundle_.tensors.size() : bundle_.workspaces.size();
    const std::string name = (is_tensor ? "tensor " : "workspace ") + to_string(operand.index);
    if (operand.index >= count) return name + " of " + to_string(count);
    if (!parameter.is_pointer) return name;
    if (!is_tensor) return "";
    const Dtype& got = *bundle_.tensors[operand.index].dtype;
    const bool fits = got.size_bytes == parameter.dtype->size_bytes;
    return fits ? "" : name + " of " + got.name + ", wanted " + parameter.dtype->name + ",";
  }

  // Whether a dtype can hold a number; a real number may be rounded.
  static bool holds(const Dtype& dtype, const Number& number) {
    if (dtype.kind == 'f') return dtype.size_bytes != 4 || std::fabs(number.real) <= std::numeric_limits<float>::max();
    if (!number.is_integer) return false;
    if (dtype.kind == 'b') return number.integer == 0 || number.integer == 1;
    if (dtype.kind == 'u' && number.integer < 0) return false;
    const size_t bits = dtype.size_bytes * 8 - (dtype.kind == 'i' ? 1 : 0);
    const int64_t size = number.integer < 0 ? -(number.integer + 1) : number.integer;
    return bits >= 63 || size >> bits == 0;
  }

  void files() const {
    std::set<std::string> names;
    for (const FileRecord& record : bundle_.files) {
      require(is_bare_name(record.name), "the file name " + quote(record.name) + " has a folder in it");
      require(names.insert(record.name).second, "two files are called " + quote(record.name));
    }
    for (const char* name : {"kernels.cu", "golden.npz", "params.npz"})
      require(names.count(name) != 0 || (bundle_.is_seeded() && std::string(name) == "params.npz"),
              std::string(name) + " is not among its files");
    require(!bundle_.images.empty(), "it has no machine code");
    for (const Image& image : bundle_.images) {
      require((image.form == "cubin" || image.form == "ptx") && is_arch(image.arch),
              "unknown machine code " + quote(image.form) + " for " + quote(image.arch));
      require(names.count(image.file) != 0, image.file + " is not among its files");
    }
  }

  // sm_ and two or three digits, then perhaps a or f.
  static bool is_arch(const std::string& arch) {
    const size_t digits = std::count_if(arch.begin(), arch.end(), [](char c) { return c >= '0' && c <= '9'; });
    const std::string end = arch.size() > 3 + digits ? arch.substr(3 + digits) : "";
    return arch.compare(0, 3, "sm_") == 0 && (digits == 2 || digits == 3) && arch.size() == 3 + digits + end.size() &&
           (end.empty() || end == "a" || end == "f") && std::isdigit(static_cast<unsigned char>(arch[2 + digits]));
  }

  void draws() const {
    if (!bundle_.is_seeded()) return;
    require(bundle_.draws.size() == bundle_.parameters.size(), "it draws " + to_string(bundle_.draws.size()) + " of " +
                                                                   to_string(bundle_.parameters.size()) +
                                                                   " parameters");
    require(bundle_.seed >= 0 && bundle_.seed <= 0xffffffff, "the seed " + to_string(bundle_.seed) + " has not 32 bits");
  }

  const Bundle& bundle_;
  const std::string& where_;
};

}  // namespace

void check_bundle(const Bundle& bundle, const std::string& where) { Check(bundle, where).all(); }

bool is_bare_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find_first_of("/\\") == std::string::npos;
}

}  // namespace tvm_fuse
