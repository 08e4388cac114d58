// Layer 2. Floats in fewer bytes and back, bit for bit, for links slower than memory.
#pragma once

#include <cstdint>
#include <string>

#include "rules.h"

namespace loft {

// A message is its length as an int64, which counts itself, and what wire/compact.cpp writes.
// Dtypes are float32, float16 and bfloat16. Throws std::invalid_argument for other arguments.

// The most bytes that a message of so many values has.
int64_t compact_room(int64_t count, DType dtype);
// Writes a message to `out`, of compact_room bytes; returns its length.
int64_t compact_cpu(const void* values, int64_t count, DType dtype, void* out,
                    const std::string& isa);
// Reads the message at the beginning of `room` bytes; false where what is there is none of so many
// values. Whatever it is, nothing outside of the room is read, and nothing outside of the values is
// written.
bool expand_cpu(const void* from, int64_t room, void* values, int64_t count, DType dtype,
                const std::string& isa);

}  // namespace loft
