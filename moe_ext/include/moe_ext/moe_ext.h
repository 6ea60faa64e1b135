// All of moe_ext: operators, modules, the optimizer, state dicts and the facts of the build.
#pragma once

#include "build.h"
#include "nn.h"
#include "ops.h"
#include "optim.h"
#include "state_dict.h"
#include "version.h"
