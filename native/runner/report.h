// A report of a run as text and as JSON: the forms of tvm_fuse/runner/report.py, field by field.
#pragma once

#include <string>

#include "measure.h"

namespace tvm_fuse {

std::string to_text(const RunReport& report);
std::string to_json(const RunReport& report);  // non-finite numbers are strings

}  // namespace tvm_fuse
