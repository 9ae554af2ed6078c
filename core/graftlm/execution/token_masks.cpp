// Sets the scores of masked tokens to minus infinity.
//
// Instruction sets: none; plain loops, which GCC vectorises for the CPU that it compiles for. Without a compiled
// library the caller uses torch's operations.
//
// The interface is plain C, for ctypes.

#include <algorithm>
#include <cstdint>
#include <limits>

extern "C" {

// scores [n, V], with row stride V; rows [m], unique; bits [m, words], where bit i of word w is token 32 w + i.
void graftlm_forbid_float32(float* scores, int64_t num_columns, const int64_t* rows, const uint32_t* bits,
                            int64_t num_rows, int64_t num_words, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t i = 0; i < num_rows; ++i) {
        float* row = scores + rows[i] * num_columns;
        for (int64_t w = 0; w < num_words; ++w) {
            const uint32_t word = bits[i * num_words + w];
            if (word == UINT32_MAX) continue;
            float* out = row + 32 * w;
            const int64_t left = num_columns - 32 * w;
            if (left >= 32) {
                for (uint32_t bit = 0; bit < 32; ++bit)
                    out[bit] = word >> bit & 1u ? out[bit] : -std::numeric_limits<float>::infinity();
            } else {
                for (int64_t bit = 0; bit < left; ++bit)
                    out[bit] = word >> bit & 1u ? out[bit] : -std::numeric_limits<float>::infinity();
            }
        }
    }
}

}  // extern "C"
