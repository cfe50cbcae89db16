// torch's large CPU tensors from the pool (see pool.h).
#pragma once
namespace dpk {

// From now on torch takes the memory of CPU tensors of 32 KiB and more from the pool. False where it cannot: this was
// built with another torch than the one that runs, or somebody else serves it.
bool serve_torch(const char* torch_version);

}  // namespace dpk
