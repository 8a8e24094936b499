// A bundle's description, as docs/bundles.md and tvm_fuse/cuda/bundle.py have it, checked when it is read.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "dtype.h"
#include "json.h"

namespace tvm_fuse {

struct Parameter {
  std::string name;
  const Dtype* dtype;  // of the value, or of what is pointed at
  bool is_pointer;
};

struct Kernel {
  std::string symbol;
  std::array<unsigned, 3> grid, block;
  unsigned smem_dynamic_bytes;
  std::vector<Parameter> parameters;
};

struct Operand {
  enum class Kind { kTensor, kWorkspace, kImmediate };
  Kind kind;
  size_t index;      // of a tensor or workspace
  Number immediate;  // else
};

struct Call {
  size_t kernel;  // index into Bundle::kernels
  std::vector<Operand> operands;
};

struct Operator {
  std::string name;
  std::vector<Call> calls;
};

struct Tensor {
  std::vector<int64_t> shape;
  const Dtype* dtype;
  size_t storage;
  size_t elements;

  size_t size_bytes() const { return elements * dtype->size_bytes; }
  std::string text() const;  // such as float32[1, 3]
};

struct Workspace {
  size_t offset_bytes, size_bytes;
};

struct Tolerance {
  double atol, rtol;
  std::string why;
};

// An input, a parameter or an output; only outputs have a tolerance.
struct Port {
  std::string name;
  size_t tensor;
  Tolerance tolerance;
};

// How a parameter is drawn: see draw.h.
struct Draw {
  double minimum, maximum, mean, deviation;
};

struct Image {
  std::string arch, form, file;
};

struct FileRecord {
  std::string name;
  size_t size_bytes;
  std::string sha256;
};

struct Bundle {
  std::string model, source_name, source_sha256, target;
  std::map<std::string, std::string> versions;
  std::vector<Port> inputs, outputs, parameters;
  int64_t seed;
  std::vector<Draw> draws;
  std::vector<Operator> operators;
  std::vector<Kernel> kernels;
  std::vector<Tensor> tensors;
  std::vector<size_t> storages;  // bytes of each
  std::vector<Workspace> workspaces;
  std::vector<Image> images;
  std::vector<FileRecord> files;

  bool is_seeded() const { return !draws.empty(); }
  size_t arena_bytes() const;
  size_t memory_bytes() const;
  size_t launch_count() const;
};

// Reads bundle.json. Throws Error (kBundle): no bundle, another version, or it contradicts itself; after that
// every index is in range, every size fits, and no file name leads out of the folder.
Bundle read_bundle(const std::string& text, const std::string& where);

// The machine code for a device: made for it, else for an older one of its kind, else PTX.
// Throws Error (kUsage): none of them runs on it.
const Image& choose_image(const Bundle& bundle, const std::string& arch);

}  // namespace tvm_fuse
