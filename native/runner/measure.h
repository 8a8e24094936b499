// The runner's job: load, run, compare, measure, as tvm_fuse/runner/run.py does it.
#pragma once

#include <string>
#include <vector>

#include "driver.h"
#include "package.h"
#include "parity.h"

namespace tvm_fuse {

struct RunOptions {
  int device = 0;
  std::string driver = "libcuda.so.1";
  std::string image;  // a file with the kernels; empty: the bundle's
  int repeats = -1;   // measurements of each piece of work; -1: 50, and 0 on the emulator
  int warmup = 10;    // executions before them
  bool kernels = false;  // also every launch by itself
};

struct Timing {
  std::vector<double> times_s;  // seconds of one execution, a number for each repeat
  int count = 0;                // executions in each repeat, between two events
  bool is_graph = false;
};

struct KernelTiming {
  std::string op, symbol;
  Timing timing;
};

struct RunReport {
  Bundle bundle;
  DeviceInfo device;
  bool is_emulated = false;
  std::string image;
  std::vector<ParityRow> parity;
  std::vector<Timing> timings;
  std::vector<KernelTiming> kernels;
  std::vector<std::string> notes;

  bool passed() const;
};

// Kernels for a device: the file that was asked for, else the bundle's choice, with its name and a note.
struct ChosenImage {
  Bytes data;
  std::vector<uint8_t> owned;
  std::string name, note;
};
ChosenImage load_image(const Package& package, const std::string& asked, const std::string& arch);

// Runs a bundle on its golden input. Outputs that differ are in `report`, not thrown; errors are Error.
void run_bundle(const std::string& folder, const RunOptions& options, RunReport& report);

}  // namespace tvm_fuse
