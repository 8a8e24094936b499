#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "report.h"

namespace tvm_fuse {
namespace {

constexpr int kWidth = 92;
constexpr double kUs = 1e6;  // microseconds of a second

__attribute__((format(printf, 1, 2))) std::string format(const char* form, ...) {
  va_list arguments, again;
  va_start(arguments, form);
  va_copy(again, arguments);
  std::string made(static_cast<size_t>(std::max(0, std::vsnprintf(nullptr, 0, form, arguments))), '\0');
  std::vsnprintf(made.data(), made.size() + 1, form, again);
  va_end(again);
  va_end(arguments);
  return made;
}

template <class List>
std::string join(const List& values, const std::string& between) {
  std::string made;
  for (const auto& value : values) made += (made.empty() ? "" : between) + std::to_string(value);
  return made;
}

std::string headline(const std::string& title, const std::string& result) {
  const int dots = kWidth - static_cast<int>(title.size() + result.size()) - 2;
  return title + " " + std::string(static_cast<size_t>(std::max(3, dots)), '.') + " " + result + "\n";
}

std::string to_text(const ParityRow& row) {
  const Tensor& tensor = *row.tensor;
  const std::string shape = tensor.shape.empty() ? "scalar" : join(tensor.shape, "x");
  std::string made = "  " + row.output + " (" + tensor.dtype->name + ", " + shape + ", " +
                     std::to_string(tensor.elements) + " values)\n";
  made += format("    largest difference %.2e, relative %.2e, mean %.2e; worst at [%s]: %.7g for %.7g\n", row.max_abs,
                 row.max_rel, row.mean_abs, join(row.worst_index, ", ").c_str(), row.worst_got, row.worst_reference);
  if (row.proves_little())
    made += format("    WEAK: zeros would pass, no value exceeds %.2g; try another --seed\n", row.reference_max);
  made += format("    allowed: %g + %g x |reference|; ", row.tolerance.atol, row.tolerance.rtol);
  if (row.passed()) return made + format("%.2g of that was needed\n", row.needed);
  return made + format("%zu values fail, %.3g times that would pass\n", row.failing, row.needed);
}

// A quantile between the two nearest numbers, as numpy.percentile takes it.
double quantile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  const double at = part * static_cast<double>(values.size() - 1);
  const size_t low = static_cast<size_t>(at), high = std::min(low + 1, values.size() - 1);
  return values[low] + (values[high] - values[low]) * (at - static_cast<double>(low));
}

double median(const Timing& timing) { return quantile(timing.times_s, 0.5); }

std::string to_text(const Timing& timing) {
  const char* name = timing.is_graph ? "as a CUDA graph" : "launched kernel by kernel";
  return format("  %-26s %10.1f us   (quartiles %.1f to %.1f; %zu repeats of %d)\n", name, median(timing) * kUs,
                quantile(timing.times_s, 0.25) * kUs, quantile(timing.times_s, 0.75) * kUs, timing.times_s.size(),
                timing.count);
}

std::string to_text(std::vector<KernelTiming> kernels) {
  double total_s = 0;
  for (const KernelTiming& kernel : kernels) total_s += median(kernel.timing);
  std::stable_sort(kernels.begin(), kernels.end(), [](const KernelTiming& one, const KernelTiming& other) {
    return median(one.timing) > median(other.timing);
  });
  std::string made = format("%-62s %9s %7s\n", "Each launch by itself", "us", "share");
  for (const KernelTiming& kernel : kernels) {
    const std::string& symbol = kernel.symbol;
    const std::string share = total_s > 0 ? format("%.1f %%", 100 * median(kernel.timing) / total_s) : "";
    made += format("  %-60s %9.2f %7s\n", symbol.substr(symbol.size() - std::min<size_t>(60, symbol.size())).c_str(),
                   median(kernel.timing) * kUs, share.c_str());
  }
  return made + format("  %-60s %9.2f\n", "sum", total_s * kUs);
}

}  // namespace

std::string to_text(const RunReport& report) {
  const DeviceInfo& device = report.device;
  const std::string where =
      report.is_emulated ? "on this machine's CPU, no GPU" : "driver for CUDA " + device.driver;
  std::string made = report.bundle.model + " on " + device.name + " (" + device.arch + ", " +
                     std::to_string(device.sms) + " SMs; " + where + ")\n";
  made += format("%s, %zu launches, %.1f MB of device memory\n\n", report.image.c_str(), report.bundle.launch_count(),
                 static_cast<double>(report.bundle.memory_bytes()) / 1e6);
  made += headline("Parity with the golden outputs", report.passed() ? "PASSED" : "FAILED");
  for (const ParityRow& row : report.parity) made += to_text(row);
  if (!report.timings.empty()) made += "\nOne inference\n";
  for (const Timing& timing : report.timings) made += to_text(timing);
  if (!report.kernels.empty()) made += "\n" + to_text(report.kernels);
  if (!report.notes.empty()) made += "\n";
  for (const std::string& note : report.notes) made += "note: " + note + "\n";
  return made;
}

}  // namespace tvm_fuse
