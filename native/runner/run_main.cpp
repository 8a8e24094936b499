// tvm-fuse-run: a bundle on its golden input, compared and measured, as `python -m tvm_fuse.runner` does it.
#include <charconv>
#include <cstdio>
#include <cstring>
#include <new>

#include "error.h"
#include "report.h"

namespace {

using namespace tvm_fuse;

constexpr const char* kUsage =
    "usage: tvm-fuse-run BUNDLE [options]\n"
    "\n"
    "Runs a bundle that `tvm-fuse export` wrote on its golden input: compares its outputs with the golden ones,\n"
    "and measures. Needs the NVIDIA driver and nothing else.\n"
    "\n"
    "  --device N      number of the GPU (default: 0)\n"
    "  --repeats N     measurements, 0 for none (default: 50; with the emulator's driver 0)\n"
    "  --warmup N      executions before them (default: 10)\n"
    "  --kernels       measure every launch by itself as well\n"
    "  --json          print one JSON document on standard output\n"
    "  --driver FILE   the CUDA driver (default: libcuda.so.1)\n"
    "  --image FILE    kernels in place of the bundle's, such as those built for the emulator\n"
    "  -h, --help      show this\n"
    "\n"
    "exit codes: 0 done; 1 the outputs differ from the golden ones; 2 usage; 3 the bundle is damaged;\n"
    "4 no driver or no GPU; 5 the driver or a kernel failed\n";

struct Arguments {
  std::string bundle;
  RunOptions options;
  bool is_json = false, is_help = false;
};

int parse_count(const std::string& option, const char* text) {
  int value = 0;
  const char* end = text + std::strlen(text);
  const auto parsed = std::from_chars(text, end, value);
  if (parsed.ec == std::errc() && parsed.ptr == end && value >= 0) return value;
  const bool is_emulator = option == "--device" && std::strcmp(text, "emulator") == 0;
  throw Error(Status::kUsage, option + ": wanted a whole number >= 0, got " + quote(text),
              is_emulator ? "`python -m tvm_fuse.runner --device emulator` compiles the kernels for the CPU" : "");
}

Arguments parse(int count, char** texts) {
  Arguments made;
  for (int i = 1; i < count; ++i) {
    const std::string text = texts[i];
    const auto value = [&]() -> const char* {
      if (i + 1 == count) throw Error(Status::kUsage, text + ": wanted a value");
      return texts[++i];
    };
    if (text == "-h" || text == "--help") made.is_help = true;
    else if (text == "--json") made.is_json = true;
    else if (text == "--kernels") made.options.kernels = true;
    else if (text == "--device") made.options.device = parse_count(text, value());
    else if (text == "--repeats") made.options.repeats = parse_count(text, value());
    else if (text == "--warmup") made.options.warmup = parse_count(text, value());
    else if (text == "--driver") made.options.driver = value();
    else if (text == "--image") made.options.image = value();
    else if (text.size() > 1 && text[0] == '-') throw Error(Status::kUsage, "unknown option " + text, "see --help");
    else if (!made.bundle.empty()) throw Error(Status::kUsage, "wanted one bundle, got a second one: " + text);
    else made.bundle = text;
  }
  if (made.bundle.empty() && !made.is_help) throw Error(Status::kUsage, "wanted a bundle", "see --help");
  return made;
}

int run(int count, char** texts) {
  const Arguments arguments = parse(count, texts);
  if (arguments.is_help) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  RunReport report;
  run_bundle(arguments.bundle, arguments.options, report);
  std::fputs(to_text(report).c_str(), arguments.is_json ? stderr : stdout);
  if (arguments.is_json) std::puts(to_json(report).c_str());
  return static_cast<int>(report.passed() ? Status::kOk : Status::kDiffers);
}

}  // namespace

int main(int count, char** texts) {
  try {
    return run(count, texts);
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.text().c_str());
    return static_cast<int>(error.status);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return static_cast<int>(Status::kInternal);
  }
}
