// Attention of a block of a chunk's tokens over their context, for one KV head.
//
// Instruction sets: see vectors.h. With AVX512-BF16, -BW and -VL, bfloat16 is multiplied in pairs (HAS_BF16_PAIRS).
// Everything is local to the source that includes it.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "token_attention.h"

namespace {

// The 32-bit words that `gemm_rows` multiplies: a word is one float, or a pair of bfloat16.
struct FloatWords {
    using Word = float;
    static constexpr int kPerWord = 1;
    static Vec multiply_add(Vec sum, Word a, Vec b) { return sum + a * b; }
};

#ifdef HAS_BF16_PAIRS
struct PairWords {
    using Word = uint32_t;
    static constexpr int kPerWord = 2;
    static Vec multiply_add(Vec sum, Word a, Vec b) {
        return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                      reinterpret_cast<__m512bh>(_mm512_set1_epi32(a)),
                                                      reinterpret_cast<__m512bh>(b)));
    }
};
#endif

// c[r][:] = c[r][:] * corrections[r] + a[r][0:depth] b[0:depth][:] for kRows rows and V vectors of columns.
template <class Words, int V>
void gemm_rows(const typename Words::Word* a, int64_t a_stride, const typename Words::Word* b, int64_t b_stride,
               int64_t depth, const float* corrections, float* c, int64_t c_stride) {
    Vec sums[kRows][V];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < V; ++v)
            sums[r][v] = corrections == nullptr ? Vec{} : load(c + r * c_stride + v * kLanes) * corrections[r];
    for (int64_t i = 0; i < depth; ++i) {
        Vec column[V];
        for (int v = 0; v < V; ++v) column[v] = load(reinterpret_cast<const float*>(b + i * b_stride + v * kLanes));
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < V; ++v) sums[r][v] = Words::multiply_add(sums[r][v], a[r * a_stride + i], column[v]);
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < V; ++v) store(c + r * c_stride + v * kLanes, sums[r][v]);
}

template <class Words>
void gemm(const typename Words::Word* a, int64_t a_stride, const typename Words::Word* b, int64_t b_stride,
          int64_t depth, const float* corrections, float* c, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r += kRows) {
        const float* scale = corrections == nullptr ? nullptr : corrections + r;
        int64_t j = 0;
        for (; j + kVectors * kLanes <= columns; j += kVectors * kLanes)
            gemm_rows<Words, kVectors>(a + r * a_stride, a_stride, b + j, b_stride, depth, scale, c + r * columns + j,
                                       columns);
        for (; j < columns; j += kLanes)
            gemm_rows<Words, 1>(a + r * a_stride, a_stride, b + j, b_stride, depth, scale, c + r * columns + j,
                                columns);
    }
}

#ifdef HAS_BF16_PAIRS
// Transposes 16 rows of 16 words: first within 128 bits, then whole 128-bit parts.
inline void transpose(__m512i (&x)[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 4) {
        const __m512i a = _mm512_unpacklo_epi32(x[i], x[i + 1]), b = _mm512_unpackhi_epi32(x[i], x[i + 1]);
        const __m512i c = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]), d = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
        y[i] = _mm512_unpacklo_epi64(a, c);
        y[i + 1] = _mm512_unpackhi_epi64(a, c);
        y[i + 2] = _mm512_unpacklo_epi64(b, d);
        y[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512i a = _mm512_shuffle_i32x4(y[i], y[i + 4], 0x88), b = _mm512_shuffle_i32x4(y[i], y[i + 4], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0x88),
                      d = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0xdd);
        x[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        x[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        x[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}
#endif

// Packs queries and weights, of type E, and keys and values, of type C, into words. Places after the tile's last token
// are filled with zeros. `buffer` has room for two rows.
template <class E, class C>
struct Packing {
    using Words = FloatWords;
    using Row = typename C::Element;
    static void query(const typename E::Element* row, int64_t dim, float* out) {
        for (int64_t d = 0; d < dim; d += kLanes) store(out + d, E::load(row + d));
    }
    // [D][kTile]
    static void keys(const Row* base, const TileRows& rows, int64_t dim, uint16_t*, float* out) {
        for (int t = 0; t < kTile; ++t) {
            const Row* row = base + rows.offsets[t];
            for (int64_t d = 0; d < dim; d += kLanes) {
                Vec key = t < rows.count ? C::load(row + d) : Vec{};
                for (int i = 0; i < kLanes; ++i) out[(d + i) * kTile + t] = key[i];
            }
        }
    }
    // [kTile][D]
    static void values(const Row* base, const TileRows& rows, int64_t dim, uint16_t*, float* out) {
        for (int t = 0; t < kTile; ++t)
            for (int64_t d = 0; d < dim; d += kLanes)
                store(out + t * dim + d, t < rows.count ? C::load(base + rows.offsets[t] + d) : Vec{});
    }
    static void weights(Vec numbers, float* out, int t) { store(out + t, numbers); }
};

#ifdef HAS_BF16_PAIRS
template <class C>
struct Packing<BFloat16, C> {
    using Words = PairWords;
    using Row = typename C::Element;
    static void query(const uint16_t* row, int64_t dim, uint32_t* out) { std::memcpy(out, row, dim * 2); }
    // [D / 2][kTile]; word i of a token contains dimensions 2i and 2i + 1
    static void keys(const Row* base, const TileRows& rows, int64_t dim, uint16_t* buffer, uint32_t* out) {
        for (int64_t i = 0; i < dim / 2; i += kLanes) {
            const int64_t width = std::min<int64_t>(kLanes, dim / 2 - i);
            const __mmask16 mask = (1u << width) - 1;
            for (int t = 0; t < kTile; t += kLanes) {
                __m512i rows_of[kLanes];
                for (int j = 0; j < kLanes; ++j) {
                    const uint16_t* row = C::halves(base + rows.offsets[t + j], dim, buffer);
                    rows_of[j] = _mm512_maskz_loadu_epi32(t + j < rows.count ? mask : 0, row + 2 * i);
                }
                transpose(rows_of);
                for (int64_t j = 0; j < width; ++j) _mm512_storeu_si512(out + (i + j) * kTile + t, rows_of[j]);
            }
        }
    }
    // [kTile / 2][D]; a word of row i contains tokens 2i and 2i + 1
    static void values(const Row* base, const TileRows& rows, int64_t dim, uint16_t* buffer, uint32_t* out) {
        for (int t = 0; t < kTile; t += 2) {
            const uint16_t* even = C::halves(base + rows.offsets[t], dim, buffer);
            const uint16_t* odd = C::halves(base + rows.offsets[t + 1], dim, buffer + dim);
            const __mmask16 has_even = t < rows.count ? 0xffff : 0, has_odd = t + 1 < rows.count ? 0xffff : 0;
            for (int64_t d = 0; d < dim; d += kLanes) {
                const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(has_even, even + d));
                const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(has_odd, odd + d));
                _mm512_storeu_si512(out + t / 2 * dim + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
        }
    }
    static void weights(Vec numbers, uint32_t* out, int t) {
        BFloat16::store(reinterpret_cast<uint16_t*>(out) + t, numbers);
    }
};
#endif

// A piece [start, end) of the context that a group of requests shares.
struct SharedPiece {
    const int32_t* members;  // indices of requests; also indices of tokens, because each request has one token
    float* const* partials;  // for each member, the destination of its partial result
    int64_t start, end;
};

// A task: the attention of `count` tokens for one KV head. The tokens are those of one request's chunk, or of requests
// that share a piece of context.
struct BlockTask {
    int64_t request;  // the request whose row of the page table is read
    int64_t kv_head;
    int64_t token;     // for a chunk: index in the batch of the block's first token
    int64_t position;  // for a chunk: position of that token in the context
    int64_t count;
    const SharedPiece* shared;  // null for a chunk
    int64_t first_member;

    int64_t token_of(int64_t i) const { return shared ? shared->members[first_member + i] : token + i; }
    // A token attends to its own position and earlier ones.
    int64_t position_of(int64_t i) const { return shared ? shared->end - 1 : position + i; }
    int64_t oldest_of(int64_t i, int64_t window) const {
        return shared || position + i < window ? 0 : position + i - window + 1;
    }
    int64_t start(int64_t window) const { return shared ? shared->start : oldest_of(0, window); }
    int64_t end() const { return shared ? shared->end : position + count; }
    float* partial_of(int64_t i) const { return shared->partials[first_member + i]; }
};

template <class E, class C>
void attend_block(const GraftlmStep& step, const GraftlmLayer& layer, const BlockTask& task, const GraftlmTensor& q,
                  const float* sinks, void* out, Scratch& scratch) {
    using Element = typename E::Element;
    using Row = typename C::Element;
    using Pack = Packing<E, C>;
    using Word = typename Pack::Words::Word;
    constexpr int kPerWord = Pack::Words::kPerWord;
    const int64_t dim = layer.head_dim, value_dim = layer.value_dim, group = layer.num_heads / layer.num_kv_heads;
    const int64_t count = task.count * group, rows = round_up(count, kRows), padded = round_up(count, kPadding);
    const int64_t depth = dim / kPerWord;
    scratch.rewind();
    Word* query = scratch.take<Word>(rows * depth);
    Word* keys = scratch.take<Word>(depth * kTile);
    Word* values = scratch.take<Word>(kTile / kPerWord * value_dim);
    Word* weights = scratch.take<Word>(padded * kTile / kPerWord);
    float* scores = scratch.take<float>(padded * kTile);
    float* mixed = scratch.take<float>(rows * value_dim);
    float* corrections = scratch.take<float>(padded);
    Softmax* softmax = scratch.take<Softmax>(padded / kLanes);
    TileRows* tiles = scratch.take<TileRows>(2);
    uint16_t* buffer = scratch.take<uint16_t>(2 * dim);
    TileScales key_scales, value_scales;

    // Row i * group + g is query head g of the block's token i.
    std::memset(query, 0, rows * depth * sizeof(Word));
    std::memset(scores, 0, padded * kTile * sizeof(float));
    std::memset(mixed, 0, rows * value_dim * sizeof(float));
    for (int64_t r = 0; r < padded; r += kLanes) softmax[r / kLanes] = Softmax();
    for (int64_t r = 0; r < count; ++r) {
        const int64_t token = task.token_of(r / group), head = task.kv_head * group + r % group;
        if (sinks != nullptr) softmax[r / kLanes].begin_with_sink<kLanes>(r % kLanes, sinks[head]);
        Pack::query(static_cast<const Element*>(q.data) + token * q.token_stride + head * q.head_stride, dim,
                    query + r * depth);
    }
    float scales[kLanes];
    std::fill(scales, scales + kLanes, layer.scale);

    const auto* key_base = static_cast<const Row*>(layer.keys) + task.kv_head * dim;
    const auto* value_base = static_cast<const Row*>(layer.values) + task.kv_head * dim;
    const int64_t first = task.start(layer.window), last = task.end();
    TileRows *tile = &tiles[0], *next = &tiles[1];
    tile->find(step, layer, task.request, first, last);
    for (int64_t start = first; start < last; start += kTile) {
        const bool more = start + kTile < last;
        if (more) next->find(step, layer, task.request, start + kTile, last);
        Pack::keys(key_base, *tile, dim, buffer, keys);
        Pack::values(value_base, *tile, value_dim, buffer, values);
        if (kHasScales<C>) key_scales.read(layer.key_scales, *tile, task.kv_head);
        if (kHasScales<C>) value_scales.read(layer.value_scales, *tile, task.kv_head);
        gemm<typename Pack::Words>(query, depth, keys, kTile, depth, nullptr, scores, rows, kTile);
        for (int64_t r = 0; r < count; ++r) {
            const int64_t position = task.position_of(r / group), oldest = task.oldest_of(r / group, layer.window);
            for (int64_t t = r; more && t < kTile; t += count) {
                prefetch<C>(key_base + next->offsets[t], dim);
                prefetch<C>(value_base + next->offsets[t], value_dim);
            }
            float* row = scores + r * kTile;
            const int64_t low = std::clamp<int64_t>(oldest - start, 0, kTile);
            const int64_t high = std::clamp<int64_t>(position + 1 - start, low, kTile);
            if (kHasScales<C>) key_scales.multiply(row, kTile);
            std::fill(row, row + low, -kInfinity);
            std::fill(row + high, row + kTile, -kInfinity);
        }
        for (int64_t first = 0; first < count; first += kLanes)
            update_softmax<kLanes>(softmax[first / kLanes], scores + first * kTile, kTile, layer, scales,
                                   corrections + first, [&](int r, int t, Vec numbers) {
                                       if (kHasScales<C>) numbers = numbers * value_scales.at(t);
                                       Pack::weights(numbers, weights + (first + r) * kTile / kPerWord, t);
                                   });
        gemm<typename Pack::Words>(weights, kTile / kPerWord, values, value_dim, kTile / kPerWord, corrections, mixed,
                                   rows, value_dim);
        std::swap(tile, next);
    }
    for (int64_t r = 0; r < count; ++r) {
        const int64_t head = task.kv_head * group + r % group;
        const float maximum = softmax[r / kLanes].maximum[r % kLanes], sum = softmax[r / kLanes].sum[r % kLanes];
        if (task.shared)
            write_partial(layer, task.partial_of(r / group), head, maximum, sum, mixed + r * value_dim);
        else
            write_mixed<E>(layer, task.token_of(r / group), head, mixed + r * value_dim, sum, out);
    }
}

}  // namespace
