// In place of NVIDIA's header; everything is declared already.
#pragma once

#include "emulator/builtins.h"
