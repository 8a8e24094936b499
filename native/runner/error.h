// The one exception of this library; it never crosses the C API.
#pragma once

#include <stdexcept>
#include <string>

namespace tvm_fuse {

// The exit codes of the commands, and the statuses of the C API.
enum class Status { kOk = 0, kDiffers = 1, kUsage = 2, kBundle = 3, kNoDevice = 4, kFailed = 5, kInternal = 70 };

// What went wrong, where, what was wanted, what was got; and what to do about it.
class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message, std::string hint = "")
      : std::runtime_error(message), status(status), hint(std::move(hint)) {}

  std::string text() const { return hint.empty() ? what() : std::string(what()) + "\nhint: " + hint; }

  Status status;
  std::string hint;
};

inline Error damaged(const std::string& message) {
  return Error(Status::kBundle, message, "copy the bundle again, or export it again");
}

inline std::string quote(const std::string& text) { return "'" + text + "'"; }

}  // namespace tvm_fuse
