// Memory for large tensors, kept from step to step: a training step asks for the same blocks each time, and fresh pages
// cost several times what it takes to fill them.
//
// One range of addresses, filled from its start. A block goes where it leaves the least over, neighbours that are free
// are one, and so what is kept is little more than the most that was in use at once. (In the C library's heap, half as
// much again to twice as much: up to glibc 2.37 an aligned block does not fit where one of its own size was.)
#pragma once
#include <cstddef>
#include <cstdint>

namespace dpk {

// A block that is aligned to 64 bytes; null if there is no room. Whether one is the pool's; giving it back.
void* take_block(size_t bytes);
bool is_pooled(const void* block);
void put_block(void* block);

// Bytes the pool holds for tensors that do not exist yet; and giving them back to the system.
int64_t pool_bytes();
void empty_pool();

}  // namespace dpk
