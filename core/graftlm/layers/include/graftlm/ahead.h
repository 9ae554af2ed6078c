// Prefetch of weights: round-robin from 16 streams, 2 KiB apart, instead of line after line. Memory serves several
// streams faster than one: two cores of a rented Sapphire Rapids server read 20 GB/s instead of 14. Each stream
// prefetches two lines at a time, since the hardware fetches lines in pairs.
//
// Instruction sets: none; prefetches are GCC's builtin.
//
// Functions that only prefetch are always inlined: GCC considers them free of effects and drops calls of them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "graftlm/sizes.h"

namespace {

constexpr int64_t kStepBytes = 2048;                        // weights that one step of a product reads: two tiles
constexpr int64_t kPlaces = kStepBytes / (2 * kLineBytes);  // streams of a block, one step's weights apart
constexpr int64_t kAheadBytes = kPlaces * kStepBytes;       // of a block

// Prefetches weights that are read once, from `first` to `end`, one block ahead of the reader.
class AheadOfOnePass {
public:
    // Prefetches the first block.
    AheadOfOnePass(const void* first, const void* end) : block_((const char*)first), end_((const char*)end) {
        const int64_t places = std::min((end_ - block_) / kStepBytes, kPlaces);
        for (int64_t line = 0; line < kStepBytes; line += kLineBytes)
            for (int64_t place = 0; place < places; ++place) __builtin_prefetch(block_ + place * kStepBytes + line);
        begin_block();
    }

    // Returns the lines of a step. Call it once per step, then `ask` for each of the step's lines.
    [[gnu::always_inline]] inline const char* next_step() {
        const char* lines = wanted_ + step_ * 2 * kLineBytes;
        if (++step_ == kPlaces) {
            block_ += kAheadBytes;
            begin_block();
        }
        return lines;
    }

    [[gnu::always_inline]] static inline void ask(const char* lines, int64_t line) {
        __builtin_prefetch(lines + line / 2 * kStepBytes + line % 2 * kLineBytes);
    }

    [[gnu::always_inline]] inline void ask() {
        const char* lines = next_step();
        for (int64_t line = 0; line < 2 * kPlaces; ++line) ask(lines, line);
    }

    // Prefetches one line. For readers whose portions are not steps.
    [[gnu::always_inline]] inline void ask_line() {
        if (line_ == 0) lines_ = next_step();
        ask(lines_, line_);
        line_ = (line_ + 1) % (2 * kPlaces);
    }

private:
    // After the last block it prefetches the current block again, which is in the cache already.
    [[gnu::always_inline]] inline void begin_block() {
        step_ = 0;
        wanted_ = block_ + kAheadBytes < end_ ? block_ + kAheadBytes : block_;
    }

    const char *block_, *end_;
    const char* wanted_ = nullptr;
    const char* lines_ = nullptr;
    int64_t step_ = 0, line_ = 0;
};

// Prefetches the next panel while several passes read the current one. Each pass covers some streams of each block.
class AheadOfPasses {
public:
    // `next`: the next panel, of `depth` steps.
    AheadOfPasses(const void* next, int64_t depth, int64_t passes)
        : next_((const char*)next), depth_(depth), places_((kPlaces + passes - 1) / passes) {}

    [[gnu::always_inline]] inline void ask() {
        const char* lines = next_ + step_ / kPlaces * kAheadBytes + step_ % kPlaces * 2 * kLineBytes;
        for (int64_t place = first_; place < std::min(first_ + places_, kPlaces); ++place) {
            __builtin_prefetch(lines + place * kStepBytes, 0, 2);
            __builtin_prefetch(lines + place * kStepBytes + kLineBytes, 0, 2);
        }
        if (++step_ < depth_) return;
        step_ = 0;
        first_ += places_;
    }

private:
    const char* next_;
    int64_t depth_, places_, step_ = 0, first_ = 0;
};

}  // namespace
