// torch's thread pool, behind the stable ABI.
#pragma once
#include <torch/csrc/stable/ops.h>

namespace dpk {
using torch::stable::parallel_for;
}
