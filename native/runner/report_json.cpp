#include <charconv>
#include <cmath>

#include "report.h"

namespace tvm_fuse {
namespace {

using Members = std::vector<std::pair<std::string, std::string>>;  // names and JSON, in the order of names

std::string json(const std::string& text) {
  std::string made = "\"";
  for (const char c : text) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') made += '\\';
    if (byte >= 0x20 && byte != 0x7f) {
      made += c;
    } else {
      char escape[8];
      snprintf(escape, sizeof escape, "\\u%04x", byte);
      made += escape;
    }
  }
  return made + "\"";
}

std::string json(double value) {
  if (std::isnan(value)) return "\"nan\"";
  if (std::isinf(value)) return value > 0 ? "\"inf\"" : "\"-inf\"";
  char text[64];
  const auto end = std::to_chars(text, text + sizeof text, value);  // the shortest that is read back the same
  const std::string made(text, end.ptr);
  return made.find_first_of(".e") == std::string::npos ? made + ".0" : made;
}

template <class T>
std::string count(T value) {
  return std::to_string(value);
}

std::string json(bool value) { return value ? "true" : "false"; }

// `items` between brackets, each on a line of its own, two columns further in.
std::string wrap(const std::vector<std::string>& items, char open, char close) {
  if (items.empty()) return {open, close};
  std::string made(1, open);
  for (size_t i = 0; i < items.size(); ++i) {
    made += i == 0 ? "\n  " : ",\n  ";
    for (const char c : items[i]) made += c == '\n' ? std::string("\n  ") : std::string(1, c);
  }
  return made + "\n" + close;
}

std::string object(const Members& members) {
  std::vector<std::string> items;
  for (const auto& member : members) items.push_back(json(member.first) + ": " + member.second);
  return wrap(items, '{', '}');
}

template <class List, class Write>
std::string list(const List& values, Write write) {
  std::vector<std::string> items;
  for (const auto& value : values) items.push_back(write(value));
  return wrap(items, '[', ']');
}

std::string json(const Timing& timing) {
  return object({{"count", count(timing.count)},
                 {"is_graph", json(timing.is_graph)},
                 {"times_s", list(timing.times_s, [](double time) { return json(time); })}});
}

std::string json(const ParityRow& row) {
  const Tensor& tensor = *row.tensor;
  const Tolerance& tolerance = row.tolerance;
  return object({
      {"dtype", json(std::string(tensor.dtype->name))},
      {"elements", count(tensor.elements)},
      {"failing", count(row.failing)},
      {"max_abs", json(row.max_abs)},
      {"max_rel", json(row.max_rel)},
      {"mean_abs", json(row.mean_abs)},
      {"needed", json(row.needed)},
      {"output", json(row.output)},
      {"problem", "\"\""},  // shape and dtype are the bundle's: outputs can always be compared
      {"reference_max", json(row.reference_max)},
      {"shape", list(tensor.shape, count<int64_t>)},
      {"tolerance",
       object({{"atol", json(tolerance.atol)}, {"rtol", json(tolerance.rtol)}, {"why", json(tolerance.why)}})},
      {"worst_got", json(row.worst_got)},
      {"worst_index", list(row.worst_index, count<size_t>)},
      {"worst_reference", json(row.worst_reference)},
  });
}

}  // namespace

std::string to_json(const RunReport& report) {
  const Bundle& bundle = report.bundle;
  const DeviceInfo& device = report.device;
  Members versions;
  for (const auto& [name, version] : bundle.versions) versions.emplace_back(name, json(version));
  return object({
      {"device", object({{"arch", json(device.arch)},
                         {"driver", json(device.driver)},
                         {"name", json(device.name)},
                         {"sms", count(device.sms)}})},
      {"image", json(report.image)},
      {"is_emulated", json(report.is_emulated)},
      {"is_seeded", json(bundle.is_seeded())},
      {"kernels", list(report.kernels,
                       [](const KernelTiming& kernel) {
                         return object({{"operator", json(kernel.op)},
                                        {"symbol", json(kernel.symbol)},
                                        {"timing", json(kernel.timing)}});
                       })},
      {"launches", count(bundle.launch_count())},
      {"memory_bytes", count(bundle.memory_bytes())},
      {"model", json(bundle.model)},
      {"notes", list(report.notes, [](const std::string& note) { return json(note); })},
      {"parity", object({{"extra", "[]"},
                         {"missing", "[]"},
                         {"rows", list(report.parity, [](const ParityRow& row) { return json(row); })},
                         {"seed", count(bundle.seed)}})},
      {"passed", json(report.passed())},
      {"schema", object({{"name", "\"tvm-fuse/bundle-run\""}, {"version", "1"}})},
      {"source_sha256", json(bundle.source_sha256)},
      {"target", json(bundle.target)},
      {"timings", list(report.timings, [](const Timing& timing) { return json(timing); })},
      {"versions", object(versions)},
  });
}

}  // namespace tvm_fuse
