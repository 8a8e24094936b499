// bundle.json to Bundle: types and single values here, what must hold between parts in bundle_check.cpp.
#include "bundle.h"
#include "bundle_check.h"
#include "error.h"

namespace tvm_fuse {
namespace {

constexpr const char* kSchema = "tvm-fuse/cuda-bundle";
constexpr int64_t kVersion = 1;
constexpr int64_t kMostBytes = int64_t{1} << 48;  // sums of a few thousand of them fit into 64 bits
constexpr int64_t kMostIndex = int64_t{1} << 31;

size_t read_size(const Field& field, int64_t most = kMostBytes) {
  const int64_t value = field.integer();
  if (value < 0 || value > most) field.refuse("a number from 0 to " + std::to_string(most));
  return static_cast<size_t>(value);
}

size_t read_index(const Field& field) { return read_size(field, kMostIndex); }

const Dtype* read_dtype(const Field& field) {
  const Dtype* found = find_dtype(field.string());
  if (found == nullptr) field.refuse("a dtype such as float32");
  return found;
}

Tensor read_tensor(const Field& field) {
  field.only({"shape", "dtype", "storage"});
  Tensor made{field.at("shape").list([](const Field& size) { return static_cast<int64_t>(read_size(size)); }),
              read_dtype(field.at("dtype")), read_index(field.at("storage")), 1};
  for (const int64_t size : made.shape) {
    const bool is_huge = __builtin_mul_overflow(made.elements, static_cast<size_t>(size), &made.elements);
    if (is_huge || made.elements > static_cast<size_t>(kMostBytes)) field.refuse("at most 2^48 elements");
  }
  return made;
}

Port read_port(const Field& field) {
  field.only({"name", "tensor"});
  return {field.at("name").string(), read_index(field.at("tensor")), {}};
}

Port read_output(const Field& field) {
  const Field tolerance = field.only({"name", "tensor", "tolerance"}).at("tolerance");
  tolerance.only({"atol", "rtol", "why"});
  return {field.at("name").string(), read_index(field.at("tensor")),
          {tolerance.at("atol").real(), tolerance.at("rtol").real(), tolerance.at("why").string()}};
}

Parameter read_parameter(const Field& field) {
  field.only({"name", "dtype", "size_bytes", "is_pointer"});
  const Parameter made{field.at("name").string(), read_dtype(field.at("dtype")), field.at("is_pointer").boolean()};
  const size_t wanted = made.is_pointer ? sizeof(void*) : made.dtype->size_bytes;
  if (read_size(field.at("size_bytes")) != wanted) field.at("size_bytes").refuse(std::to_string(wanted));
  return made;
}

std::array<unsigned, 3> read_dim3(const Field& field, const std::array<int64_t, 3>& most) {
  if (field.size() != 3) field.refuse("3 entries");
  std::array<unsigned, 3> made;
  for (size_t i = 0; i < 3; ++i) {
    const int64_t size = field.at(i).integer();
    if (size < 1 || size > most[i]) field.at(i).refuse("a number from 1 to " + std::to_string(most[i]));
    made[i] = static_cast<unsigned>(size);
  }
  return made;
}

// The limits are those of every architecture (CUDA C++ Programming Guide, technical specifications).
Kernel read_kernel(const Field& field) {
  field.only({"symbol", "grid", "block", "smem_dynamic_bytes", "parameters"});
  const Kernel made{field.at("symbol").string(), read_dim3(field.at("grid"), {0x7fffffff, 65535, 65535}),
                    read_dim3(field.at("block"), {1024, 1024, 64}),
                    static_cast<unsigned>(read_size(field.at("smem_dynamic_bytes"), 1 << 20)),
                    field.at("parameters").list(read_parameter)};
  if (made.block[0] * made.block[1] * made.block[2] > 1024) field.at("block").refuse("at most 1024 threads");
  return made;
}

Operand read_operand(const Field& field) {
  const std::string kind = field.only({"kind", "value"}).at("kind").string();
  const Field value = field.at("value");
  if (kind == "immediate") return {Operand::Kind::kImmediate, 0, value.number()};
  if (kind == "tensor") return {Operand::Kind::kTensor, read_index(value), {}};
  if (kind == "workspace") return {Operand::Kind::kWorkspace, read_index(value), {}};
  field.at("kind").refuse("tensor, workspace or immediate");
}

Workspace read_workspace(const Field& field) {
  field.only({"offset_bytes", "size_bytes"});
  return {read_size(field.at("offset_bytes")), read_size(field.at("size_bytes"))};
}

Draw read_draw(const Field& field) {
  field.only({"minimum", "maximum", "mean", "deviation"});
  return {field.at("minimum").real(), field.at("maximum").real(), field.at("mean").real(),
          field.at("deviation").real()};
}

Image read_image(const Field& field) {
  field.only({"arch", "form", "file"});
  return {field.at("arch").string(), field.at("form").string(), field.at("file").string()};
}

FileRecord read_file_record(const Field& field) {
  field.only({"name", "size_bytes", "sha256"});
  return {field.at("name").string(), read_size(field.at("size_bytes")), field.at("sha256").string()};
}

// Calls name kernels by their symbols.
Operator read_operator(const Field& field, const std::map<std::string, size_t>& kernels) {
  field.only({"name", "calls"});
  const auto read_call = [&kernels](const Field& call) {
    call.only({"symbol", "operands"});
    const auto found = kernels.find(call.at("symbol").string());
    if (found == kernels.end()) call.at("symbol").refuse("one of its kernels");
    return Call{found->second, call.at("operands").list(read_operand)};
  };
  return {field.at("name").string(), field.at("calls").list(read_call)};
}

void check_schema(const Json& document, const std::string& where) {
  const Field schema = Field(document, "", where).at("schema");
  const std::string name = schema.at("name").string();
  const int64_t version = schema.at("version").integer();
  if (name == kSchema && version == kVersion) return;
  throw Error(Status::kBundle,
              where + ": the bundle is " + name + ", version " + std::to_string(version) + "; wanted " + kSchema +
                  ", version " + std::to_string(kVersion),
              "use the tvm-fuse that wrote it");
}

}  // namespace

Bundle read_bundle(const std::string& text, const std::string& where) {
  const Json document = parse_json(text, where);
  check_schema(document, where);
  const Field root(document, "", where);
  root.only({"schema", "model", "provenance", "inputs", "outputs", "parameters", "seed", "draws", "operators",
             "kernels", "tensors", "storages", "workspaces", "images", "files"});
  const Field provenance = root.at("provenance").only({"source", "versions", "target"});
  const Field source = provenance.at("source").only({"name", "sha256"});

  Bundle made;
  made.model = root.at("model").string();
  made.source_name = source.at("name").string();
  made.source_sha256 = source.at("sha256").string();
  made.target = provenance.at("target").string();
  provenance.at("versions").each([&made](const std::string& name, const Field& value) {
    made.versions[name] = value.string();
  });
  made.inputs = root.at("inputs").list(read_port);
  made.outputs = root.at("outputs").list(read_output);
  made.parameters = root.at("parameters").list(read_port);
  made.seed = root.at("seed").integer();
  made.draws = root.at("draws").list(read_draw);
  made.kernels = root.at("kernels").list(read_kernel);
  std::map<std::string, size_t> kernels;
  for (size_t i = 0; i < made.kernels.size(); ++i) kernels.emplace(made.kernels[i].symbol, i);
  if (kernels.size() != made.kernels.size()) root.at("kernels").refuse("no symbol twice");
  made.operators =
      root.at("operators").list([&kernels](const Field& field) { return read_operator(field, kernels); });
  made.tensors = root.at("tensors").list(read_tensor);
  made.storages = root.at("storages").list([](const Field& field) { return read_size(field); });
  made.workspaces = root.at("workspaces").list(read_workspace);
  made.images = root.at("images").list(read_image);
  made.files = root.at("files").list(read_file_record);
  check_bundle(made, where);
  return made;
}

}  // namespace tvm_fuse
