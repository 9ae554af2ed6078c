// What asks memory for weights before they are read: not one line after the other, but in turns from places that lie
// apart. Memory answers several streams faster than one: two cores of a rented Sapphire Rapids server read 20 instead
// of 14 GB/s. At a place, two lines are asked for together, as the hardware brings them in pairs.
//
// Functions that only prefetch are always inlined: GCC takes them for functions without effect, and drops calls of
// them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "graftlm/sizes.h"

namespace {

constexpr int64_t kStepBytes = 2048;                        // what a step of a product reads: two tiles of weights
constexpr int64_t kPlaces = kStepBytes / (2 * kLineBytes);  // in a block, a step's weights apart
constexpr int64_t kAheadBytes = kPlaces * kStepBytes;       // of a block

// For weights that are read once, from `first` to `end`: asks for the block after the one that is read.
class AheadOfOnePass {
public:
    // The first block is asked for at once.
    AheadOfOnePass(const void* first, const void* end) : block_((const char*)first), end_((const char*)end) {
        const int64_t places = std::min((end_ - block_) / kStepBytes, kPlaces);
        for (int64_t line = 0; line < kStepBytes; line += kLineBytes)
            for (int64_t place = 0; place < places; ++place) __builtin_prefetch(block_ + place * kStepBytes + line);
        begin_block();
    }

    // Where the lines of a step are: to be called once for each, before `ask` for each of its lines.
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

    // The same line by line, for whoever reads in portions of its own: asks for one line.
    [[gnu::always_inline]] inline void ask_line() {
        if (line_ == 0) lines_ = next_step();
        ask(lines_, line_);
        line_ = (line_ + 1) % (2 * kPlaces);
    }

private:
    // Where there is no block after it, the one that is read is asked for again, which costs nothing.
    [[gnu::always_inline]] inline void begin_block() {
        step_ = 0;
        wanted_ = block_ + kAheadBytes < end_ ? block_ + kAheadBytes : block_;
    }

    const char *block_, *end_;
    const char* wanted_ = nullptr;
    const char* lines_ = nullptr;
    int64_t step_ = 0, line_ = 0;
};

// For panels that rows of x pass by several times: asks for the next panel, some places of each block in each pass.
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
