// Chooses tokens: the most likely token of a row, or a token drawn after temperature, top-k, top-p and min-p.
//
// The kernel computes the functions of vocab_blocks.py, sampling_filters.py and noise.py, one row at a time. A row is
// read in place, and its weights stay in a core's cache until its token is chosen. Every search uses the largest number
// of each block of 128 columns to skip blocks.
//
// Instruction sets: none; GCC splits its vector types into the registers that the CPU has. Without a compiled library
// the caller uses torch's operations.
//
// The interface is plain C, for ctypes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "graftlm/bfloat16.h"
#include "graftlm/exp2.h"

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kBlock = 128;  // the block size of vocab_blocks.py
constexpr float kNothing = -std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));

inline float number(float x) { return x; }

inline float number(uint16_t bits) { return widen_bf16(bits); }

inline Vec load(const float* p) {
    Vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline Vec load(const uint16_t* p) {
    HalfVec halves;
    std::memcpy(&halves, p, sizeof halves);
    return widen_bf16<Vec, WordVec>(halves);
}

// Loads the numbers from p on; kNothing replaces the numbers from index `count` on.
template <typename T>
inline Vec load(const T* p, int64_t count) {
    if (count >= kLanes) return load(p);
    Vec x = Vec{} + kNothing;
    for (int64_t i = 0; i < count; ++i) x[i] = number(p[i]);
    return x;
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// Reduces the lanes of a vector by combining its two halves repeatedly.
template <typename Join>
inline float joined(Vec x, const Join& join) {
    float lanes[kLanes];
    std::memcpy(lanes, &x, sizeof x);
    for (int64_t half = kLanes / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; ++i) lanes[i] = join(lanes[i], lanes[i + half]);
    return lanes[0];
}

inline float largest_of(Vec x) {
    return joined(x, [](float a, float b) { return a > b ? a : b; });
}

inline float sum_of(Vec x) {
    return joined(x, [](float a, float b) { return a + b; });
}

struct Best {
    float value;  // the largest of all numbers; NaN if there is one
    int64_t column;
};

// Finds the first of a row's largest numbers, or its first NaN. Writes each block's largest number, NaNs excluded.
template <typename T>
Best find_best(const T* row, int64_t num_columns, float* block_largest) {
    Best best{kNothing, 0};
    int64_t best_block = 0;
    IntVec nans{};
    for (int64_t block = 0; block * kBlock < num_columns; ++block) {
        const int64_t start = block * kBlock, end = std::min(start + kBlock, num_columns);
        Vec largest = Vec{} + kNothing;
        for (int64_t c = start; c < end; c += kLanes) {
            const Vec x = load(row + c, end - c);
            largest = larger(x, largest);
            nans |= x != x;
        }
        block_largest[block] = largest_of(largest);
        if (block_largest[block] > best.value) {
            best.value = block_largest[block];
            best_block = block;
        }
    }
    int32_t has_nan = 0;
    for (int64_t i = 0; i < kLanes; ++i) has_nan |= nans[i];
    if (has_nan) {
        int64_t c = 0;
        while (!std::isnan(number(row[c]))) ++c;
        return {std::numeric_limits<float>::quiet_NaN(), c};
    }
    best.column = best_block * kBlock;
    while (best.column < num_columns - 1 && number(row[best.column]) != best.value) ++best.column;
    return best;
}

// The working memory of a thread, for rows of one length.
struct Scratch {
    std::vector<float> weights, candidates, block_largest, block_sums, order;

    void fit(int64_t num_columns) {
        const int64_t num_blocks = (num_columns + kBlock - 1) / kBlock;
        for (std::vector<float>* part : {&weights, &candidates}) part->resize(num_blocks * kBlock);
        for (std::vector<float>* part : {&block_largest, &block_sums, &order}) part->resize(num_blocks);
    }

    // Returns the calling thread's memory, which is kept between rows and steps: allocating it takes longer than the
    // work in it.
    static Scratch& of_thread(int64_t num_columns) {
        static thread_local Scratch scratch;
        scratch.fit(num_columns);
        return scratch;
    }
};

// Returns the k-th largest number of a row of at least k numbers. `scratch.block_largest` must be set.
template <typename T>
float find_kth_largest(const T* row, int64_t num_columns, int64_t k, Scratch& scratch) {
    float* const candidates = scratch.candidates.data();
    const int64_t num_blocks = static_cast<int64_t>(scratch.block_largest.size());
    float least = kNothing;  // lower bound of the result: at least k blocks contain a number this large
    if (k <= num_blocks) {
        scratch.order = scratch.block_largest;
        std::nth_element(scratch.order.begin(), scratch.order.begin() + (k - 1), scratch.order.end(), std::greater<>());
        least = scratch.order[k - 1];
    }
    int64_t count = 0;
    for (int64_t block = 0; block < num_blocks; ++block) {
        if (scratch.block_largest[block] < least) continue;
        const int64_t end = std::min((block + 1) * kBlock, num_columns);
        for (int64_t c = block * kBlock; c < end; ++c) {
            candidates[count] = number(row[c]);
            count += candidates[count] >= least;
        }
    }
    std::nth_element(candidates, candidates + (k - 1), candidates + count, std::greater<>());
    return candidates[k - 1];
}

// A bin holds weights of about the same size, within 3 %. No weight is larger than 1.
constexpr int kBinShift = 18;
constexpr uint32_t kNumBins = (127u << (23 - kBinShift)) + 1;

inline uint32_t bin_of(float weight) { return bits_as<uint32_t>(weight) >> kBinShift; }

// Returns the smallest of the largest weights whose sum reaches `wanted`, or the smallest of all weights if their sum
// is less. Sorts only the weights of the bin in which the sum is reached.
float find_last(float* weights, int64_t count, double wanted) {
    std::vector<double> sums(kNumBins, 0.0);
    for (int64_t i = 0; i < count; ++i) sums[bin_of(weights[i])] += weights[i];
    double above = 0.0;
    uint32_t last = kNumBins;  // the last bin with weights so far
    for (uint32_t bin = kNumBins; bin-- > 0;) {
        if (sums[bin] == 0.0) continue;
        if (last < kNumBins) above += sums[last];
        last = bin;
        if (above + sums[bin] >= wanted) break;
    }
    float* const end = std::partition(weights, weights + count, [&](float weight) { return bin_of(weight) == last; });
    std::sort(weights, end, std::greater<>());
    for (float* weight = weights; weight != end; ++weight) {
        above += *weight;
        if (above >= wanted) return *weight;
    }
    return *(end - 1);
}

inline uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// Returns number `place`, counted from 0, of a key's sequence of exponentially distributed numbers; see noise.py.
inline double noise_at(uint64_t key, int64_t place) {
    const uint64_t bits = mixed(key + static_cast<uint64_t>(place + 1) * 0x9E3779B97F4A7C15u);
    return -std::log((static_cast<double>(bits >> 11) + 0.5) * 0x1p-53);
}

struct Settings {
    double temperature, top_p, min_p;
    int64_t top_k;
    uint64_t key;
};

// Draws a column. The row has no NaN, its largest number is finite, and `scratch.block_largest` is set.
template <typename T>
int64_t draw(const T* row, int64_t num_columns, float largest, const Settings& wanted, Scratch& scratch) {
    float* const weights = scratch.weights.data();
    const int64_t num_blocks = static_cast<int64_t>(scratch.block_sums.size());
    const float least =
        wanted.top_k < num_columns ? find_kth_largest(row, num_columns, wanted.top_k, scratch) : kNothing;
    const float scale = kLog2E / static_cast<float>(wanted.temperature);
    double total = 0.0;
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t start = block * kBlock;
        Vec sum{};
        if (scratch.block_largest[block] < least || scratch.block_largest[block] == kNothing) {
            std::fill(weights + start, weights + start + kBlock, 0.0f);
        } else {
            for (int64_t c = start; c < start + kBlock; c += kLanes) {
                const Vec x = load(row + c, num_columns - c);
                Vec weight = exp2_negative<IntVec>((x - largest) * scale);
                weight = x >= least && x != kNothing ? weight : Vec{};
                std::memcpy(weights + c, &weight, sizeof weight);
                sum += weight;
            }
        }
        scratch.block_sums[block] = sum_of(sum);
        total += scratch.block_sums[block];
    }
    float bound = static_cast<float>(wanted.min_p);  // the largest weight is 1
    if (wanted.top_p < 1.0) {
        // A few tokens usually have enough weight; blocks without such tokens are skipped.
        int64_t count = 0;
        for (float look : {0x1p-6f, 0x1p-12f, 0x1p-18f, 0.0f}) {
            count = 0;
            double sum = 0.0;
            for (int64_t block = 0; block < num_blocks; ++block) {
                if (scratch.block_sums[block] < look) continue;  // then each weight in the block is smaller too
                for (int64_t c = block * kBlock; c < (block + 1) * kBlock; ++c) {
                    const bool is_candidate = weights[c] >= look && weights[c] > 0.0f;
                    scratch.candidates[count] = weights[c];
                    count += is_candidate;
                    sum += is_candidate ? weights[c] : 0.0f;
                }
            }
            if (sum >= wanted.top_p * total) break;
        }
        bound = std::max(bound, find_last(scratch.candidates.data(), count, wanted.top_p * total));
    }
    int64_t best_block = 0;
    double best = 0.0;
    for (int64_t block = 0; block < num_blocks; ++block) {
        float sum = scratch.block_sums[block];
        if (sum < bound || sum <= 0.0f) continue;
        if (bound > 0.0f) {
            Vec kept{};
            for (int64_t c = block * kBlock; c < (block + 1) * kBlock; c += kLanes) {
                const Vec weight = load(weights + c);
                kept += weight >= bound ? weight : Vec{};
            }
            sum = sum_of(kept);
            if (sum == 0.0f) continue;
        }
        const double time = sum / noise_at(wanted.key, block);
        if (time > best) {
            best = time;
            best_block = block;
        }
    }
    int64_t chosen = best_block * kBlock;
    best = 0.0;
    for (int64_t i = 0; i < kBlock; ++i) {
        const float weight = weights[best_block * kBlock + i];
        if (weight < bound || weight == 0.0f) continue;
        const double time = weight / noise_at(wanted.key, num_blocks + i);
        if (time > best) {
            best = time;
            chosen = best_block * kBlock + i;
        }
    }
    return chosen;
}

template <typename T>
void find_most_likely(const T* logits, int64_t row_stride, int64_t num_rows, int64_t num_columns, int64_t* columns,
                      bool* is_bad, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
        Scratch& scratch = Scratch::of_thread(num_columns);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < num_rows; ++r) {
            const Best best = find_best(logits + r * row_stride, num_columns, scratch.block_largest.data());
            columns[r] = best.column;
            is_bad[r] = !std::isfinite(best.value);
        }
    }
}

template <typename T>
void draw_rows(const T* logits, int64_t row_stride, int64_t num_rows, int64_t num_columns, const int64_t* whole,
               const double* real, int64_t* columns, int64_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
        Scratch& scratch = Scratch::of_thread(num_columns);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_rows; ++i) {
            const Settings wanted{real[i], real[num_rows + i], real[2 * num_rows + i], whole[num_rows + i],
                                  static_cast<uint64_t>(whole[2 * num_rows + i])};
            const T* row = logits + whole[i] * row_stride;
            const Best best = find_best(row, num_columns, scratch.block_largest.data());
            columns[i] = std::isfinite(best.value) ? draw(row, num_columns, best.value, wanted, scratch) : best.column;
        }
    }
}

}  // namespace

extern "C" {

// logits [n, V], with row stride `row_stride`; columns [n]; is_bad [n].
void graftlm_most_likely_float32(const float* logits, int64_t row_stride, int64_t num_rows, int64_t num_columns,
                                 int64_t* columns, bool* is_bad, int64_t num_threads) {
    find_most_likely(logits, row_stride, num_rows, num_columns, columns, is_bad, num_threads);
}

void graftlm_most_likely_bfloat16(const uint16_t* logits, int64_t row_stride, int64_t num_rows, int64_t num_columns,
                                  int64_t* columns, bool* is_bad, int64_t num_threads) {
    find_most_likely(logits, row_stride, num_rows, num_columns, columns, is_bad, num_threads);
}

// logits [n, V], with row stride `row_stride`; whole [3, m]: rows of logits, top_k (at least 1) and keys; real [3, m]:
// temperature, top_p and min_p; columns [m].
void graftlm_draw_float32(const float* logits, int64_t row_stride, int64_t num_rows, int64_t num_columns,
                          const int64_t* whole, const double* real, int64_t* columns, int64_t num_threads) {
    draw_rows(logits, row_stride, num_rows, num_columns, whole, real, columns, num_threads);
}

void graftlm_draw_bfloat16(const uint16_t* logits, int64_t row_stride, int64_t num_rows, int64_t num_columns,
                           const int64_t* whole, const double* real, int64_t* columns, int64_t num_threads) {
    draw_rows(logits, row_stride, num_rows, num_columns, whole, real, columns, num_threads);
}

}  // extern "C"
