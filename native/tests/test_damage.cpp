// Damaged bundles: every contradiction has a message, and no change of any byte ends in a crash.
#include <random>

#include "bundle_check.h"
#include "check.h"
#include "error.h"
#include "variants.h"

using namespace tvm_fuse;
using variants::Folder;

namespace {

// What opening and reading a bundle says: empty when it says nothing.
std::string open(const std::string& folder) {
  try {
    const Package package = open_folder(folder);
    load_parameters(package);
    load_golden(package, package.bundle.inputs, "input");
    load_golden(package, package.bundle.outputs, "output");
  } catch (const Error& error) {
    check(error.status == Status::kBundle, std::string("another status for: ") + error.what());
    return error.what();
  }
  return "";
}

struct Edit {
  const char *from, *to, *message;
};

// Of by_hand/bundle.json.
const Edit kEdits[] = {
    {"\"version\": 1", "\"version\": 2", "the bundle is tvm-fuse/cuda-bundle, version 2; wanted tvm-fuse/cuda-bundle, version 1"},
    {"\"model\"", "\"modal\"", "no field 'model'"},
    {"\"seed\": 7", "\"seed\": \"7\"", "seed: wanted a number, got '7'"},
    {"\"seed\": 7", "\"seed\": 7, \"more\": 1", "unknown field 'more'"},
    {"\"tensor\": 0", "\"tensor\": 4", "'x' is tensor 4 of 4"},
    {"\"tensor\": 0", "\"tensor\": -1", "inputs[0].tensor: wanted a number from 0 to"},
    {"\"tensor\": 0", "\"tensor\": 1e3", "wanted an integer of 64 bits, got 1e3"},
    {"\"symbol\": \"add_one\"", "\"symbol\": \"add_two\"", "wanted one of its kernels, got 'add_two'"},
    {"\"kind\": \"workspace\"", "\"kind\": \"shared\"", "wanted tensor, workspace or immediate, got 'shared'"},
    {"\"kind\": \"immediate\"", "\"kind\": \"tensor\"", "wanted an integer of 64 bits, got 0.5"},
    {"\"value\": 0.5", "\"value\": 1e39", "passes no float32 for 'factor' to scale"},
    {"\"kind\": \"workspace\",\n       \"value\": 0", "\"kind\": \"workspace\",\n       \"value\": 1", "add passes workspace 1 of 1 for 'out' to add_one"},
    {"\"kind\": \"workspace\"", "\"kind\": \"immediate\"", "add passes a number for 'out' to add_one"},
    {"\"size_bytes\": 4", "\"size_bytes\": 8", "wanted 4, got 8"},
    {"\"is_pointer\": true", "\"is_pointer\": 1", "wanted true or false, got 1"},
    {"\"dtype\": \"float32\"", "\"dtype\": \"float31\"", "wanted a dtype such as float32, got 'float31'"},
    {"\"storages\": [\n  24", "\"storages\": [\n  20", "tensor 0 has 24 bytes, its storage 20"},
    {"\"storages\": [\n  24", "\"storages\": [\n  281474976710657", "wanted a number from 0 to 281474976710656"},
    {"\"storage\": 0", "\"storage\": 9", "tensor 0 lies in storage 9 of 4"},
    {"\"shape\": [\n    2,", "\"shape\": [\n    -2,", "tensors[0].shape[0]: wanted a number from 0"},
    {"\"shape\": [\n    2,", "\"shape\": [\n    281474976710656, 281474976710656,", "wanted at most 2^48 elements"},
    {"\"offset_bytes\": 256", "\"offset_bytes\": -256", "wanted a number from 0"},
    {"\"smem_dynamic_bytes\": 65536", "\"smem_dynamic_bytes\": -1", "wanted a number from 0 to 1048576, got -1"},
    {"\"grid\": [\n    3,", "\"grid\": [\n    0,", "kernels[0].grid[0]: wanted a number from 1 to 2147483647, got 0"},
    {"\"grid\": [\n    3,", "\"grid\": [\n    3, 3,", "wanted 3 entries, got a list of 4"},
    {"\"block\": [\n    2,\n    1", "\"block\": [\n    64,\n    32", "wanted at most 1024 threads"},
    {"\"name\": \"kernels.cu\"", "\"name\": \"../kernels.cu\"", "the file name '../kernels.cu' has a folder in it"},
    {"\"name\": \"kernels.cu\"", "\"name\": \"/etc/passwd\"", "has a folder in it"},
    {"\"name\": \"kernels.cu\"", "\"name\": \"..\"", "has a folder in it"},
    {"\"name\": \"golden.npz\"", "\"name\": \"golden.zip\"", "golden.npz is not among its files"},
    {"\"name\": \"params.npz\"", "\"name\": \"golden.npz\"", "two files are called 'golden.npz'"},
    {"\"file\": \"kernels.sm_80.cubin\"", "\"file\": \"other\"", "other is not among its files"},
    {"\"form\": \"cubin\"", "\"form\": \"fatbin\"", "unknown machine code 'fatbin' for 'sm_80'"},
    {"\"arch\": \"sm_80\"", "\"arch\": \"sm_8x0\"", "unknown machine code 'cubin' for 'sm_8x0'"},
    {"\"draws\": []", "\"draws\": [{\"minimum\": 0, \"maximum\": 1, \"mean\": 0, \"deviation\": 1}, {\"minimum\": 0, \"maximum\": 1, \"mean\": 0, \"deviation\": 1}]", "it draws 2 of 1 parameters"},
    {"\"name\": \"w\"", "\"name\": \"x\"", "two inputs or parameters are called 'x'"},
};

void test_contradictions() {
  check_equal(open(Folder("by_hand").text()), "", "the bundle as it is");
  for (const Edit& edit : kEdits) {
    Folder folder("by_hand");
    folder.edit(edit.from, edit.to);
    check_contains(open(folder.text()), edit.message, edit.to);
  }
}

void test_files() {
  const auto changed = [](const char* name, const std::function<void(std::string&)>& change) {
    Folder folder("by_hand");
    folder.rewrite(name, change);
    return open(folder.text());
  };
  {
    Folder folder("by_hand");
    folder.edit_file("params.npz", "NUMPY", "NUMPI");
    check_contains(open(folder.text()), "params.npz: its contents are not those that were exported (SHA-256 differs)", "a byte");
    std::filesystem::resize_file(folder.path / "params.npz", 100);
    check_contains(open(folder.text()), "params.npz: wanted 282 bytes, got 100", "a size");
    std::filesystem::remove(folder.path / "params.npz");
    check_contains(open(folder.text()), "params.npz: the file is missing", "a file");
    std::filesystem::create_directory(folder.path / "params.npz");
    check_contains(open(folder.text()), "params.npz: the file is missing", "a folder");
  }
  check_contains(changed("params.npz", [](std::string& text) { text.resize(100); }), "wanted an end of the directory", "a short archive");
  check_contains(changed("params.npz", [](std::string& text) { text.clear(); }), "wanted an end of the directory", "no archive");
  check_contains(changed("params.npz", [](std::string& text) { variants::replace(text, "<f4", "<f8"); }),
                 "'w': wanted float32[2, 3], got '<f8'[2, 3]", "a dtype");
  check_contains(changed("params.npz", [](std::string& text) { variants::replace(text, "(2, 3)", "(3, 2)"); }),
                 "'w': wanted float32[2, 3], got '<f4'[3, 2]", "a shape");
  check_contains(changed("params.npz", [](std::string& text) { text[text.find("PK\1\2") + 10] = 8; }),
                 "wanted 'p0.npy' stored as numpy.savez does, not compressed", "a compressed archive");
}

// Thousands of small changes, the same ones in every run: each is refused, or reads as another bundle.
void test_any_change() {
  std::mt19937 random(1);
  const std::string text = variants::read(std::string(TVM_FUSE_TESTDATA) + "/net/bundle.json");
  static const char* const kPieces[] = {"-1", "1e308", "99999999999999999999", "null", "[]", "{}", "\"", "[[[[", "0", "4294967296", "\\u0000"};
  size_t refused = 0;
  constexpr int kCount = 4000;
  for (int i = 0; i < kCount; ++i) {
    std::string changed = text;
    const size_t at = random() % changed.size();
    switch (random() % 4) {
      case 0: changed[at] = static_cast<char>(random()); break;
      case 1: changed.erase(at, 1 + random() % 40); break;
      case 2: changed.insert(at, kPieces[random() % std::size(kPieces)]); break;
      default: changed.resize(at);
    }
    try {
      read_bundle(changed, "here");
    } catch (const Error& error) {
      refused += error.status == Status::kBundle;
    }
  }
  check(refused > kCount / 2, "few changes of bundle.json were refused: " + std::to_string(refused));

  const Folder folder("net");
  const Package package = open_folder(folder.text());
  std::vector<uint8_t> data = package.owned.at("golden.npz");
  for (int i = 0; i < kCount; ++i) {
    std::vector<uint8_t> changed = data;
    const int count = 1 + static_cast<int>(random() % 4);
    for (int k = 0; k < count; ++k) changed[random() % changed.size()] = static_cast<uint8_t>(random());
    if (random() % 3 == 0) changed.resize(random() % changed.size());
    std::vector<uint8_t> exact(changed);  // on the heap with nothing to spare, for the sanitizer
    exact.shrink_to_fit();
    try {
      const Npz npz({exact.data(), exact.size()}, "here");
      for (size_t k = 0; k < package.bundle.outputs.size(); ++k)
        npz.read("output" + std::to_string(k), "x", package.bundle.tensors[package.bundle.outputs[k].tensor]);
    } catch (const Error&) {
    }
  }
}

}  // namespace

int main() {
  test_contradictions();
  test_files();
  test_any_change();
  return failures;
}
