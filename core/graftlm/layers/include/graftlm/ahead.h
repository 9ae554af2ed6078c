// Prefetch of weights: round-robin from 16 streams, 2 KiB apart, instead of line after line. Memory serves several
// streams faster than one: two cores of a Sapphire Rapids server read 20 GB/s instead of 14. Each stream prefetches two
// lines at a time, because the hardware fetches lines in pairs.
//
// Instruction sets: none is required; prefetches are GCC's builtin.
//
// Functions that only prefetch are always inlined, because GCC considers them free of effects and drops calls of them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "graftlm/sizes.h"

namespace {

constexpr int64_t kStepBytes = 2048;                         // bytes that one step of a product reads: two tiles
constexpr int64_t kStreams = kStepBytes / (2 * kLineBytes);  // streams of a block, one step's weights apart
constexpr int64_t kAheadBytes = kStreams * kStepBytes;       // size of a block

// Prefetches weights that are read once, from `first` to `end`, one block ahead of the reader.
class AheadOfOnePass {
public:
    // Prefetches the first block.
    AheadOfOnePass(const void* first, const void* end) : block_((const char*)first), end_((const char*)end) {
        const int64_t streams = std::min((end_ - block_) / kStepBytes, kStreams);
        for (int64_t line = 0; line < kStepBytes; line += kLineBytes)
            for (int64_t stream = 0; stream < streams; ++stream)
                __builtin_prefetch(block_ + stream * kStepBytes + line);
        begin_block();
    }

    // Returns the address of the lines to prefetch in this step. Call this function once per step, then call `prefetch`
    // with this address and each line index below 2 * kStreams.
    [[gnu::always_inline]] inline const char* next_step() {
        const char* lines = next_block_ + step_ * 2 * kLineBytes;
        if (++step_ == kStreams) {
            block_ += kAheadBytes;
            begin_block();
        }
        return lines;
    }

    [[gnu::always_inline]] static inline void prefetch(const char* lines, int64_t line) {
        __builtin_prefetch(lines + line / 2 * kStepBytes + line % 2 * kLineBytes);
    }

    [[gnu::always_inline]] inline void prefetch() {
        const char* lines = next_step();
        for (int64_t line = 0; line < 2 * kStreams; ++line) prefetch(lines, line);
    }

    // Prefetches one line. For readers that do not read in steps.
    [[gnu::always_inline]] inline void prefetch_line() {
        if (line_ == 0) lines_ = next_step();
        prefetch(lines_, line_);
        line_ = (line_ + 1) % (2 * kStreams);
    }

private:
    // Within the last block, the current block is prefetched again; this is cheap, because it is already in the cache.
    [[gnu::always_inline]] inline void begin_block() {
        step_ = 0;
        next_block_ = block_ + kAheadBytes < end_ ? block_ + kAheadBytes : block_;
    }

    const char *block_, *end_;
    const char* next_block_ = nullptr;
    const char* lines_ = nullptr;
    int64_t step_ = 0, line_ = 0;
};

// Prefetches the next panel while several passes read the current one. Each pass covers some streams of each block.
class AheadOfPasses {
public:
    // `next`: the next panel, of `depth` steps.
    AheadOfPasses(const void* next, int64_t depth, int64_t passes)
        : next_((const char*)next), depth_(depth), streams_((kStreams + passes - 1) / passes) {}

    [[gnu::always_inline]] inline void prefetch() {
        const char* lines = next_ + step_ / kStreams * kAheadBytes + step_ % kStreams * 2 * kLineBytes;
        for (int64_t stream = first_stream_; stream < std::min(first_stream_ + streams_, kStreams); ++stream) {
            __builtin_prefetch(lines + stream * kStepBytes, 0, 2);
            __builtin_prefetch(lines + stream * kStepBytes + kLineBytes, 0, 2);
        }
        if (++step_ < depth_) return;
        step_ = 0;
        first_stream_ += streams_;
    }

private:
    const char* next_;
    int64_t depth_, streams_, step_ = 0, first_stream_ = 0;
};

}  // namespace
