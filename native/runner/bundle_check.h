// What must hold between the parts of a bundle.
#pragma once

#include "bundle.h"

namespace tvm_fuse {

// Throws Error (kBundle) with the first contradiction.
void check_bundle(const Bundle& bundle, const std::string& where);

// Whether a name is a file's in the folder itself.
bool is_bare_name(const std::string& name);

}  // namespace tvm_fuse
