#include "measure.h"

#include <algorithm>
#include <cmath>

#include "embedded.h"
#include "error.h"
#include "network.h"

namespace tvm_fuse {
namespace {

constexpr double kLeastRepeatS = 2e-3;  // of one repeat: short work is done many times
constexpr int kMostCalls = 1000;
constexpr int kLaunchesOfGraph = 20;  // of one kernel, where it is measured by itself
constexpr int kRepeats = 50;

using Arrays = std::vector<std::vector<uint8_t>>;
using Work = std::function<void()>;

class Run {
 public:
  Run(Device& device, Network& network, const Bundle& bundle, const Arrays& golden, const RunOptions& options)
      : device_(device), network_(network), bundle_(bundle), golden_(golden), options_(options) {}

  // Computes all outputs from nothing, and compares each within its own tolerance.
  std::vector<ParityRow> check(const Work& work) {
    network_.poison();
    work();
    std::vector<ParityRow> rows;
    for (size_t i = 0; i < bundle_.outputs.size(); ++i) {
      const Port& port = bundle_.outputs[i];
      const Tensor& tensor = bundle_.tensors[port.tensor];
      std::vector<uint8_t> got(tensor.size_bytes());
      network_.get(port, got.data());
      rows.push_back(compare(port, tensor, golden_[i], got));
    }
    return rows;
  }

  // One inference, as launches and as a graph, and every launch by itself where that is asked for.
  void measure(RunReport& report) {
    const Work run = [this] { network_.run(); };
    report.timings.push_back(time(run, 1, false));
    bool can_capture = true;
    try {
      Graph graph(device_, run);
      const Work launch = [&graph] { graph.launch(); };
      const std::vector<ParityRow> rows = check(launch);
      if (!std::all_of(rows.begin(), rows.end(), [](const ParityRow& row) { return row.passed(); }))
        throw Error(Status::kDiffers, "the outputs are right launch by launch, and wrong as a CUDA graph");
      report.timings.push_back(time(launch, 1, true));
    } catch (const CudaError& error) {
      report.notes.push_back(std::string("not measured as a CUDA graph: ") + error.what());
      can_capture = false;
    }
    if (!options_.kernels) return;
    for (const Step& step : network_.steps())
      report.kernels.push_back({step.op, step.launch.kernel->symbol, time_step(step, can_capture)});
  }

 private:
  // One launch again and again: in a graph, where they follow each other faster than from here.
  Timing time_step(const Step& step, bool can_capture) {
    const Work launch = [&] { device_.launch(step.launch); };
    if (!can_capture) return time(launch, 1, false);
    Graph graph(device_, [&] {
      for (int i = 0; i < kLaunchesOfGraph; ++i) launch();
    });
    return time([&graph] { graph.launch(); }, kLaunchesOfGraph, true);
  }

  // Work that is a number of executions of something.
  Timing time(const Work& work, int executions, bool is_graph) {
    for (int i = 0; i < options_.warmup; ++i) work();
    const double once_s = device_.time(work, 1);
    const double enough = once_s > 0 ? std::ceil(kLeastRepeatS / once_s) : kMostCalls;
    const int calls = static_cast<int>(std::min<double>(kMostCalls, std::max(enough, 1.0)));
    Timing made{{}, calls * executions, is_graph};
    for (int i = 0; i < options_.repeats; ++i) made.times_s.push_back(device_.time(work, calls) / executions);
    return made;
  }

  Device& device_;
  Network& network_;
  const Bundle& bundle_;
  const Arrays& golden_;
  const RunOptions& options_;
};

}  // namespace

bool RunReport::passed() const {
  return std::all_of(parity.begin(), parity.end(), [](const ParityRow& row) { return row.passed(); });
}

ChosenImage load_image(const Package& package, const std::string& asked, const std::string& arch) {
  ChosenImage made;
  if (!asked.empty()) {
    made.owned = read_file(asked, Status::kUsage);
    made.data = {made.owned.data(), made.owned.size()};
    made.name = asked.substr(asked.find_last_of('/') + 1);
    return made;
  }
  const auto given = package.files.find(kEmbeddedImage);
  if (given != package.files.end()) {
    made.data = given->second;
    return made;
  }
  const Image& image = choose_image(package.bundle, arch);
  made.data = package.file(image.file);
  made.name = image.file;
  if (image.form == "ptx") {
    made.note = "no cubin fits " + arch + ": the driver compiled PTX for " + image.arch;
  } else if (image.arch != arch) {
    made.note = "the cubin is for " + image.arch + ", the device is " + arch;
  }
  return made;
}

void run_bundle(const std::string& folder, const RunOptions& asked, RunReport& report) {
  const Package package = open_folder(folder);
  report.bundle = package.bundle;
  const Bundle& bundle = report.bundle;
  const Arrays inputs = load_golden(package, bundle.inputs, "input");
  const Arrays golden = load_golden(package, bundle.outputs, "output");
  if (bundle.is_seeded()) report.notes.push_back("the parameters are drawn from a seed: the outputs mean nothing");

  Device device(asked.device, asked.driver);
  report.device = device.info();
  report.is_emulated = device.is_emulated();
  const ChosenImage image = load_image(package, asked.image, device.info().arch);
  report.image = image.name;
  if (!image.note.empty()) report.notes.push_back(image.note);
  if (report.is_emulated)
    report.notes.push_back(
        "emulated on the CPU: it says nothing about speed, and not all that could fail on a GPU fails here");
  RunOptions options = asked;
  if (options.repeats < 0) options.repeats = report.is_emulated ? 0 : kRepeats;

  const Device::Current current(device);
  Network network(device, bundle, image.data);
  const Arrays parameters = load_parameters(package);
  for (size_t i = 0; i < parameters.size(); ++i) network.set(bundle.parameters[i], parameters[i].data());
  for (size_t i = 0; i < inputs.size(); ++i) network.set(bundle.inputs[i], inputs[i].data());
  Run run(device, network, bundle, golden, options);
  report.parity = run.check([&network] { network.run_checked(); });
  if (options.repeats == 0) return;
  if (report.passed()) return run.measure(report);
  report.notes.push_back("nothing was measured: the outputs are wrong");
}

}  // namespace tvm_fuse
