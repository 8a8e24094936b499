#include "package.h"

#include <filesystem>
#include <fstream>

#include "draw.h"
#include "error.h"
#include "sha256.h"

namespace tvm_fuse {
namespace {

constexpr const char* kBundleFile = "bundle.json";
constexpr uintmax_t kMostDescriptionBytes = 256u << 20;

std::string path_in(const std::string& folder, const std::string& name) { return folder + "/" + name; }

std::vector<uint8_t> read_checked(const std::string& path, const FileRecord& record) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) throw damaged(path + ": the file is missing");
  const uintmax_t got = std::filesystem::file_size(path, ignored);
  if (got != record.size_bytes)
    throw damaged(path + ": wanted " + std::to_string(record.size_bytes) + " bytes, got " + std::to_string(got));
  std::vector<uint8_t> data = read_file(path, Status::kBundle);
  if (data.size() != record.size_bytes || sha256(data.data(), data.size()) != record.sha256)
    throw damaged(path + ": its contents are not those that were exported (SHA-256 differs)");
  return data;
}

std::vector<std::vector<uint8_t>> read_arrays(const Package& package, const std::string& file,
                                              const std::string& prefix, const std::vector<Port>& ports) {
  const Npz arrays(package.file(file), path_in(package.where, file));
  std::vector<std::vector<uint8_t>> made;
  for (size_t i = 0; i < ports.size(); ++i)
    made.push_back(arrays.read(prefix + std::to_string(i), ports[i].name, package.bundle.tensors[ports[i].tensor]));
  return made;
}

}  // namespace

Bytes Package::file(const std::string& name) const {
  const auto found = files.find(name);
  if (found == files.end()) throw damaged(path_in(where, name) + ": the file is missing");
  return found->second;
}

std::vector<uint8_t> read_file(const std::string& path, Status status) {
  std::error_code failed;
  const bool is_file = std::filesystem::is_regular_file(path, failed);
  const uintmax_t size = is_file ? std::filesystem::file_size(path, failed) : 0;
  std::ifstream stream(path, std::ios::binary);
  if (!is_file || failed || !stream) throw Error(status, path + ": cannot be read");
  std::vector<uint8_t> data(static_cast<size_t>(size));
  stream.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(data.size()));
  if (static_cast<uintmax_t>(stream.gcount()) != size) throw Error(status, path + ": it ends too early");
  return data;
}

Package open_folder(const std::string& folder) {
  const std::string path = path_in(folder, kBundleFile);
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored))
    throw Error(Status::kUsage, folder + ": no " + kBundleFile + " in it",
                "`tvm-fuse export MODEL -o BUNDLE` writes a bundle");
  if (std::filesystem::file_size(path, ignored) > kMostDescriptionBytes)
    throw damaged(path + ": wanted at most " + std::to_string(kMostDescriptionBytes) + " bytes");
  const std::vector<uint8_t> text = read_file(path, Status::kBundle);
  Package made;
  made.where = folder;
  made.bundle = read_bundle(std::string(text.begin(), text.end()), path);
  for (const FileRecord& record : made.bundle.files) {
    const auto& data = made.owned[record.name] = read_checked(path_in(folder, record.name), record);
    made.files[record.name] = {data.data(), data.size()};
  }
  return made;
}

std::vector<std::vector<uint8_t>> load_parameters(const Package& package) {
  const Bundle& bundle = package.bundle;
  if (!bundle.is_seeded()) return read_arrays(package, "params.npz", "p", bundle.parameters);
  Stream stream(static_cast<uint32_t>(bundle.seed));
  std::vector<std::vector<uint8_t>> made;
  for (size_t i = 0; i < bundle.parameters.size(); ++i)
    made.push_back(stream.draw(bundle.tensors[bundle.parameters[i].tensor], bundle.draws[i]));
  return made;
}

std::vector<std::vector<uint8_t>> load_golden(const Package& package, const std::vector<Port>& ports,
                                              const std::string& prefix) {
  return read_arrays(package, "golden.npz", prefix, ports);
}

}  // namespace tvm_fuse
