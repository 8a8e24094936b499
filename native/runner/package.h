// A bundle with the contents of its files, from a folder or from memory.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "bundle.h"
#include "error.h"
#include "npz.h"

namespace tvm_fuse {

struct Package {
  std::string where;  // the folder, for messages
  Bundle bundle;
  std::map<std::string, Bytes> files;
  std::map<std::string, std::vector<uint8_t>> owned;  // what `files` points at, where it does not live elsewhere

  Bytes file(const std::string& name) const;
};

// All of a file. Throws Error (`status`).
std::vector<uint8_t> read_file(const std::string& path, Status status);

// Reads a folder and checks that every file is the one that was written: its size and SHA-256.
// Throws Error: kUsage when there is no bundle, kBundle when it is damaged.
Package open_folder(const std::string& folder);

// The parameters in order; drawn where the bundle has only a seed for them. Throws Error (kBundle).
std::vector<std::vector<uint8_t>> load_parameters(const Package& package);

// The golden arrays of inputs or outputs, in order; `prefix` is "input" or "output". Throws Error (kBundle).
std::vector<std::vector<uint8_t>> load_golden(const Package& package, const std::vector<Port>& ports,
                                              const std::string& prefix);

}  // namespace tvm_fuse
