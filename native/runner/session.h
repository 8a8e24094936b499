// A network that is ready for a caller: what the C API and embedded networks have in common.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "network.h"
#include "package.h"

namespace tvm_fuse {

class Session {
 public:
  // Loads kernels and parameters; of the package only the description is kept. `image`: a file with the
  // kernels, in place of the bundle's; empty: none.
  Session(Package package, int device, const std::string& driver, const std::string& image);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Bundle& bundle() const { return package_.bundle; }
  void set_input(size_t index, const void* data, size_t size_bytes);
  void run();
  void get_output(size_t index, void* data, size_t size_bytes);

  // One of `ports`, with its tensor; `what` is it, for messages. Throws Error (kUsage).
  const Port& port(const std::vector<Port>& ports, size_t index, const char* what) const;

 private:
  void check_copy(const Port& port, const void* data, size_t size_bytes) const;

  Package package_;
  Device device_;
  std::unique_ptr<Network> network_;
  std::unique_ptr<Graph> graph_;  // from the second run on, where the driver can make one
  std::vector<bool> is_set_;
  bool has_run_ = false;
};

// Carries out `work`; what it throws becomes a status, and the text of tvm_fuse_last_error().
int guarded(const std::function<void()>& work) noexcept;

}  // namespace tvm_fuse
