// Copies of the test bundles with something changed, each in a folder that goes away.
#pragma once

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include <unistd.h>

#include "package.h"
#include "sha256.h"

namespace variants {

namespace fs = std::filesystem;
using Text = std::string;

inline Text read(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

inline void write(const fs::path& file, const Text& text) { std::ofstream(file, std::ios::binary) << text; }

// Replaces the first `from`, which must be there.
inline void replace(Text& text, const Text& from, const Text& to) {
  const size_t at = text.find(from);
  if (at == Text::npos) throw std::runtime_error("the test expects to find: " + from);
  text.replace(at, from.size(), to);
}

class Folder {
 public:
  explicit Folder(const Text& bundle) {
    Text name = (fs::temp_directory_path() / "tvm_fuse_test_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path = name;
    fs::copy(fs::path(TVM_FUSE_TESTDATA) / bundle, path);
  }
  ~Folder() { fs::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  void edit(const Text& from, const Text& to) { edit_file("bundle.json", from, to); }
  void edit_file(const Text& name, const Text& from, const Text& to) {
    Text text = read(path / name);
    replace(text, from, to);
    write(path / name, text);
  }

  // Changes a file, and lets bundle.json have its hash.
  void rewrite(const Text& name, const std::function<void(Text&)>& change) {
    Text text = read(path / name), description = read(path / "bundle.json");
    const auto hash = [](const Text& of) { return tvm_fuse::sha256(reinterpret_cast<const uint8_t*>(of.data()), of.size()); };
    const Text before = hash(text), size = std::to_string(text.size());
    change(text);
    replace(description, before, hash(text));
    const size_t record = description.find("\"name\": \"" + name + "\"");
    description.replace(description.find(size, record), size.size(), std::to_string(text.size()));
    write(path / name, text);
    write(path / "bundle.json", description);
  }

  Text text() const { return path.string(); }
  fs::path path;
};

}  // namespace variants
