// The small readers, each on what it must read and on what it must refuse.
#include <cmath>
#include <cstring>

#include "check.h"
#include "draw.h"
#include "error.h"
#include "parity.h"
#include "variants.h"

using namespace tvm_fuse;
using variants::Folder;

namespace {

std::string refusal(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void test_json() {
  const std::string where = "here";
  const Json value = parse_json(R"( {"a": [1, -2.5e-3, true, null], "b": "\u00e9\ud83d\ude00\n", "c": {}} )", where);
  const Field root(value, "", where);
  check_equal(root.at("a").at(0).integer(), 1, "an integer");
  check_equal(root.at("a").at(1).real(), -2.5e-3, "a real number");
  check_equal(root.at("b").string(), "\xc3\xa9\xf0\x9f\x98\x80\n", "escapes");
  for (const char* wrong :
       {"", "{", "[1,]", "{\"a\":1,}", "01", "1.", "+1", "1e", "NaN", "Infinity", "tru", "'a'", "\"a", "\"\\x\"",
        "\"\\u12\"", "\"\\ud800\"", "\"\\ud800\\u0041\"", "\"\\udc00\"", "\"\\u0000\"", "\"\t\"", "1 2", "{\"a\":1,\"a\":2}", "{1:2}",
        "\"\xff\"", "\"\xc0\x80\"", "\"\xed\xa0\x80\"", "\"\xe2\x82\"", "[\"a\" 1]"})
    check_contains(refusal([&] { parse_json(wrong, where); }), "here: no JSON at byte", wrong);
  const std::string deep(100000, '[');
  check_contains(refusal([&] { parse_json(deep, where); }), "wanted at most 32 levels", "deep lists");
  const Json numbers = parse_json("[9223372036854775807, 9223372036854775808, 1e999, 1.0]", where);
  const Field list(numbers, "n", where);
  check_equal(list.at(0).integer(), INT64_MAX, "the largest integer");
  check_contains(refusal([&] { list.at(1).integer(); }), "n[1]: wanted an integer of 64 bits, got 9223372036854775808", "2^63");
  check_contains(refusal([&] { list.at(2).real(); }), "n[2]: wanted a number that float64 holds", "1e999");
  check_contains(refusal([&] { list.at(3).integer(); }), "wanted an integer", "1.0");
  check_contains(refusal([&] { list.at(4); }), "wanted more than 4 entries", "an index");
}

void test_sha256() {  // FIPS 180-4's examples, and every way to end a block
  const auto digest = [](const std::string& text) {
    return sha256(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  };
  check_equal(digest(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", "nothing");
  check_equal(digest("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "abc");
  check_equal(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1", "56 bytes");
  check_equal(digest(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
              "a million");
}

void test_half() {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const double value = from_half(static_cast<uint16_t>(bits));
    if (std::isnan(value)) continue;
    if (to_half(value) != bits) check_equal(to_half(value), bits, "float16 of " + std::to_string(value));
    const double next = from_half(static_cast<uint16_t>(bits + 1));
    if (!std::isfinite(next) || !std::isfinite(value)) continue;
    const unsigned even = bits & 1 ? bits + 1 : bits;  // halfway between two
    if (to_half((value + next) / 2) != even && (bits & 0x7fff) != 0x7fff)
      check_equal(to_half((value + next) / 2), even, "the tie after " + std::to_string(value));
  }
  check_equal(to_half(65519.999), 0x7bff, "below the tie with infinity");
  check_equal(to_half(-1e300), 0xfc00, "a large number");
  check_equal(to_half(1e-30), 0, "a small number");
}

// SHA-256 of tvm_fuse/cuda/bundle_files.py's draw_parameters with seed 12345, one after the other.
struct Drawn {
  const char* dtype;
  int64_t size;
  Draw how;
  const char* digest;
};
const Drawn kDrawn[] = {
    {"float32", 1001, {-2.0, 2.5, 0.25, 1.5},
     "e34c709da2783ab3760c425b858ef3727716a2d40f34125d9569ecdc8815b3df"},
    {"float16", 77, {-1.0, 1.0, 0.0, 0.5},
     "1bc94049c60ff4449cdd0a178ecd2ef1758bf73361019a4e5d79768f7a76be17"},
    {"float64", 15, {-9.0, 9.0, 0.1, 1.0},
     "c247a6f0f4aa1d839b7531d41ca68064583be50f5c87bf436ad11a74b0fe81aa"},
    {"int8", 100, {-7.0, 9.0, 0, 0},
     "35d86341f2d6f11b31e8e02e66d377bbd5be40feb1ff458500c88580fe8473f2"},
    {"int64", 50, {-1000000000000.0, 3000000000000.0, 0, 0},
     "f94e3c0b96a5f07c11d1f81ad6c0dad97f56a22a323db8c5a87c5e00ba087226"},
    {"uint32", 33, {0, 4294967295.0, 0, 0},
     "864b689269dd35db41d6046e51b941db8082a8d5b58315d21377f00c824bf0ef"},
    {"bool", 40, {0, 1, 0, 0},
     "7f0701b3016f65a294d43180c36014f171778456a9b27e3483a71dc115310d2b"},
    {"int32", 3, {5, 5, 0, 0},
     "0a389783af9ac112b6de32eb03659eab9f1ca425fe8ef2b08f60454bc1f7395b"},
    {"float32", 4, {-1, 1, 0, 1},
     "c12632e45c9205fac34c7492d0610cee6a23001d1393b550bb29df59b9414e28"},
};

void test_draws() {
  Stream stream(12345);
  for (const Drawn& row : kDrawn) {
    const Tensor tensor{{row.size}, find_dtype(row.dtype), 0, static_cast<size_t>(row.size)};
    const std::vector<uint8_t> got = stream.draw(tensor, row.how);
    check_equal(sha256(got.data(), got.size()), row.digest, std::string("drawn ") + tensor.text());
  }
}

void test_npz() {
  const Folder folder("net");
  const Package package = open_folder(folder.text());
  const auto inputs = load_golden(package, package.bundle.inputs, "input");
  check_equal(inputs.size(), 1u, "inputs");
  check_equal(inputs[0].size(), 72 * sizeof(float), "bytes of the input");
  const Npz npz(package.file("golden.npz"), "g");
  const Tensor& tensor = package.bundle.tensors[package.bundle.inputs[0].tensor];
  Tensor other = tensor;
  other.shape = {1, 2, 36};
  check_contains(refusal([&] { npz.read("input0", "x", other); }), "g: 'x': wanted float32[1, 2, 36], got '<f4'[1, 2, 6, 6]", "a shape");
  other = tensor;
  other.dtype = find_dtype("int32");
  check_contains(refusal([&] { npz.read("input0", "x", other); }), "wanted int32[1, 2, 6, 6], got '<f4'", "a dtype");
  check_contains(refusal([&] { npz.read("input1", "x", tensor); }), "g: no array 'input1' for 'x'", "a missing array");
}

void test_column_major() {  // 2 x 3 elements, as numpy.savez keeps the transpose of an array
  Folder folder("by_hand");
  const auto read = [&folder] {
    const Package package = open_folder(folder.text());
    std::vector<float> w(6);
    std::memcpy(w.data(), load_parameters(package).at(0).data(), 6 * sizeof(float));
    return w;
  };
  const std::vector<float> w = read();
  folder.rewrite("params.npz", [](std::string& text) { variants::replace(text, "False, ", "True,  "); });
  check(read() == std::vector<float>{w[0], w[2], w[4], w[1], w[3], w[5]}, "columns first");
}

// Against the rule of tvm_fuse/core/parity.py: |got - reference| <= atol + rtol x |reference|.
void test_parity() {
  const double nan = std::nan(""), inf = HUGE_VAL;
  const Tolerance tolerance{0.5, 0.25, ""};
  const auto compare_one = [&](const char* dtype, auto reference, auto got) {
    const Tensor tensor{{1}, find_dtype(dtype), 0, 1};
    std::vector<uint8_t> bytes[2] = {std::vector<uint8_t>(sizeof reference), std::vector<uint8_t>(sizeof got)};
    std::memcpy(bytes[0].data(), &reference, sizeof reference);
    std::memcpy(bytes[1].data(), &got, sizeof got);
    return compare({"y", 0, tolerance}, tensor, bytes[0], bytes[1]);
  };
  const double kPairs[][3] = {  // reference, got, whether it passes
      {2, 3, 1}, {2, 3.0001, 0}, {2, 1, 1}, {-2, -0.9999, 0}, {0, 0.5, 1}, {0, 0.5001, 0}, {nan, nan, 1},
      {inf, inf, 1}, {inf, -inf, 0}, {1, nan, 0}, {nan, 1, 0}, {1, inf, 0}};
  for (const auto& [reference, got, passes] : kPairs) {
    const ParityRow row = compare_one("float64", reference, got);
    check_equal(row.passed(), passes == 1, std::to_string(got) + " for " + std::to_string(reference));
  }
  check_equal(compare_one("float64", 2.0, 3.5).needed, 1.5, "the factor that would pass");
  check_equal(compare_one("float64", 2.0, 3.5).max_rel, 0.75, "the relative difference");
  const int64_t large = int64_t{1} << 60;
  check_equal(compare_one("int64", large, large + 1).max_abs, 1.0, "a difference that float64 does not hold");
}

void test_images() {
  const auto choose = [](const std::string& arch) {
    Bundle bundle;
    bundle.images = {{"sm_80", "cubin", "80"}, {"sm_75", "ptx", "ptx"}, {"sm_90", "cubin", "90"}, {"sm_90a", "cubin", "90a"}};
    return choose_image(bundle, arch).file;
  };
  const char* const kRows[][2] = {{"sm_80", "80"}, {"sm_86", "80"}, {"sm_89", "80"}, {"sm_90", "90a"}, {"sm_75", "ptx"}, {"sm_120", "ptx"}};
  for (const auto& row : kRows) check_equal(choose(row[0]), row[1], row[0]);
  check_equal(refusal([&] { choose("sm_70"); }),
              "the bundle has no machine code for sm_70; it has cubin for sm_80, ptx for sm_75, cubin for sm_90, cubin for sm_90a",
              "an old device");
}

}  // namespace

int main() {
  test_json();
  test_sha256();
  test_half();
  test_draws();
  test_npz();
  test_column_major();
  test_parity();
  test_images();
  return failures;
}
