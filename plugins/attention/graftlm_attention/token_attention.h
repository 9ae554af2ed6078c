// Attention of one token over its context, for all heads.
//
// Instruction sets: see vectors.h. With AVX512-BF16, -BW and -VL, bfloat16 is multiplied in pairs (HAS_BF16_PAIRS);
// with AVX512-VNNI and -BW, int8 codes are multiplied as 16-bit integers (HAS_INT16_PAIRS). Everything is local to the
// source that includes it.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "online_softmax.h"

namespace {

// The cache rows of N context tokens of a request. Entries after the last token repeat the last token's offsets.
template <int N>
struct RowsOf {
    int64_t offsets[N];  // offset of each token's row, in elements from the start of the layer's keys or values
    int64_t scales[N];   // offset of each token's scales, in elements from the start of the layer's scales
    int count;

    void find(const GraftlmStep& step, const GraftlmLayer& layer, int64_t request, int64_t start, int64_t end) {
        const int32_t* pages = step.page_table + request * step.table_columns;
        count = static_cast<int>(std::min<int64_t>(N, end - start));
        int64_t page = start / step.page_size, within = start % step.page_size;
        for (int i = 0; i < count; ++i) {
            scales[i] = (pages[page] * step.page_size + within) * layer.num_kv_heads;
            offsets[i] = scales[i] * layer.head_dim;
            if (++within == step.page_size) {
                within = 0;
                ++page;
            }
        }
        for (int i = count; i < N; ++i) {
            offsets[i] = offsets[count - 1];
            scales[i] = scales[count - 1];
        }
    }
};

// The scales of N tokens' keys or values for one KV head. Scales past the last token are zeros.
template <int N>
struct ScalesOf {
    alignas(64) float numbers[N];

    void read(const uint16_t* scales, const RowsOf<N>& rows, int64_t kv_head) {
        for (int t = 0; t < rows.count; ++t) numbers[t] = widen_bf16(scales[rows.scales[t] + kv_head]);
        for (int t = rows.count; t < N; ++t) numbers[t] = 0.0f;
    }
    Vec at(int t) const { return load(numbers + t); }
    void multiply(float* row, int count) const {
        for (int t = 0; t < count; t += kLanes) store(row + t, load(row + t) * load(numbers + t));
    }
};

using TileRows = RowsOf<kTile>;
using TileScales = ScalesOf<kTile>;

template <class C>
void prefetch(const typename C::Element* start, int64_t elements) {
    const char* line = reinterpret_cast<const char*>(start);
    const char* end = reinterpret_cast<const char*>(start + elements);
    for (; line < end; line += kLineBytes) __builtin_prefetch(line, 0, 2);
}

// Prefetch of the next tile: one slice for each token of the current tile. The prefetches are spread over the
// arithmetic, so that both overlap. If all were issued together, they would fill the miss buffers and stall the
// arithmetic.
template <class C>
struct Ahead {
    const typename C::Element* slices[kTile];
    const uint16_t* scales[kTile];
    int64_t elements = 0;     // per slice; 0: nothing to prefetch
    bool has_scales = false;  // whether to prefetch `scales` as well

    void fetch(int t) const {
        prefetch<C>(slices[t], elements);
        if (kHasScales<C> && has_scales) __builtin_prefetch(scales[t], 0, 2);
    }
    void stop() {
        elements = 0;
        has_scales = false;
    }
};

// The dot product of one token's query, of type E, with keys, of type C. It multiplies floats, or pairs of bfloat16 or
// of 16-bit integers. `pack` returns the factor by which the products must be multiplied.
template <class E, class C>
struct Dot {
    using Query = float;
    using Sum = Vec;
    static constexpr int kStep = kLanes;
    static float pack(const typename E::Element* row, int64_t dim, float* out) {
        for (int64_t d = 0; d < dim; d += kLanes) store(out + d, E::load(row + d));
        return 1.0f;
    }
    static Vec query(const float* p, int64_t) { return load(p); }
    static Vec key(const typename C::Element* p, int64_t) { return C::load(p); }
    static Vec multiply_add(Vec sum, Vec a, Vec b) { return sum + a * b; }
    static Vec to_float(Vec sums) { return sums; }
};

#ifdef HAS_BF16_PAIRS
template <>
struct Dot<BFloat16, BFloat16> {
    using Query = uint16_t;
    using Sum = Vec;
    static constexpr int kStep = 2 * kLanes;
    static float pack(const uint16_t* row, int64_t dim, uint16_t* out) {
        std::memcpy(out, row, dim * 2);
        return 1.0f;
    }
    static Vec to_float(Vec sums) { return sums; }
    static Vec key(const uint16_t* p, int64_t left) {
        if (left >= kStep) return reinterpret_cast<Vec>(_mm512_loadu_si512(p));
        return reinterpret_cast<Vec>(_mm512_maskz_loadu_epi16(0xffff, p));  // D is an odd multiple of 16
    }
    static Vec query(const uint16_t* p, int64_t left) { return key(p, left); }
    static Vec multiply_add(Vec sum, Vec a, Vec b) {
        return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a),
                                                      reinterpret_cast<__m512bh>(b)));
    }
};
#endif

#ifdef HAS_INT16_PAIRS
// Writes a row as 16-bit integers relative to its largest magnitude, and returns their scale; NaN if the row contains
// NaN. The sum of `count` products with codes fits into 32 bits.
template <class E>
inline float pack_int16(const typename E::Element* row, int64_t dim, int64_t count, int16_t* out) {
    const float bound = std::min(32767.0f, 2147483000.0f / (127.0f * count) - 1.0f);
    const float scale = largest_magnitude<E>(row, dim) / bound;
    for (int64_t d = 0; d < dim; d += kLanes) {
        Vec x = E::load(row + d) / scale;
        x = x == x ? clamp(x, bound) : Vec{};
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d),
                            _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(round_to_int<IntVec>(x))));
    }
    return scale;
}

// Converts bfloat16 queries to 16-bit integers. The numbers keep their 8 significant bits, unless they are far smaller
// than the row's largest number. Products of pairs are exact, and need half the instructions of float products.
template <>
struct Dot<BFloat16, Int8> {
    using Query = int16_t;
    using Sum = IntVec;
    static constexpr int kStep = 2 * kLanes;
    static float pack(const uint16_t* row, int64_t dim, int16_t* out) {
        return pack_int16<BFloat16>(row, dim, dim, out);
    }
    static IntVec query(const int16_t* p, int64_t left) {
        if (left >= kStep) return reinterpret_cast<IntVec>(_mm512_loadu_si512(p));
        return reinterpret_cast<IntVec>(_mm512_maskz_loadu_epi16(0xffff, p));  // D is an odd multiple of 16
    }
    static IntVec key(const int8_t* p, int64_t left) {
        const auto* start = reinterpret_cast<const __m256i*>(p);
        if (left >= kStep) return reinterpret_cast<IntVec>(_mm512_cvtepi8_epi16(_mm256_loadu_si256(start)));
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return reinterpret_cast<IntVec>(_mm512_cvtepi8_epi16(_mm256_zextsi128_si256(half)));
    }
    static IntVec multiply_add(IntVec sum, IntVec a, IntVec b) {
        return reinterpret_cast<IntVec>(_mm512_dpwssd_epi32(
            reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
    }
    static Vec to_float(IntVec sums) { return __builtin_convertvector(sums, Vec); }
};
#endif

// scores[r][t] = q[r] . k[t] for R rows of one KV head. The R * kTokens sums of one iteration fill a vector.
template <class E, class C, int R>
void dot_rows(const typename Dot<E, C>::Query* q, const typename C::Element* keys, const TileRows& rows,
              const Ahead<C>& ahead, int64_t dim, float* scores) {
    using Product = Dot<E, C>;
    using Sum = typename Product::Sum;
    constexpr int kTokens = kLanes / R;
    for (int t = 0; t < rows.count; t += kTokens) {
        Sum sums[kLanes] = {};
        for (int i = 0; i < kTokens; ++i) ahead.fetch(t + i);
        for (int64_t d = 0; d < dim; d += Product::kStep) {
            Sum query[R];
            for (int r = 0; r < R; ++r) query[r] = Product::query(q + r * dim + d, dim - d);
            for (int i = 0; i < kTokens; ++i) {
                Sum key = Product::key(keys + rows.offsets[t + i] + d, dim - d);
                for (int r = 0; r < R; ++r)
                    sums[r * kTokens + i] = Product::multiply_add(sums[r * kTokens + i], query[r], key);
            }
        }
        Vec totals = Product::to_float(sum_each(sums));
        for (int r = 0; r < R; ++r)
            std::memcpy(scores + r * kTile + t, reinterpret_cast<float*>(&totals) + r * kTokens, kTokens * 4);
    }
}

// mixed[r] = mixed[r] * corrections[r] + sum over tokens of weights[r][t] * v[t], for R rows and V vectors of D_v.
template <class C, int R, int V>
void mix_rows(const float* weights, const float* corrections, const typename C::Element* values, const TileRows& rows,
              const Ahead<C>* ahead, int64_t dim, float* mixed) {
    Vec sums[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] = load(mixed + r * dim + v * kLanes) * corrections[r];
    for (int t = 0; t < rows.count; ++t) {
        const typename C::Element* row = values + rows.offsets[t];
        if (ahead != nullptr) ahead->fetch(t);
        Vec value[V];
        for (int v = 0; v < V; ++v) value[v] = C::load(row + v * kLanes);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) sums[r][v] += weights[r * kTile + t] * value[v];
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(mixed + r * dim + v * kLanes, sums[r][v]);
}

template <class C, int R>
void mix_all(const float* weights, const float* corrections, const typename C::Element* values, const TileRows& rows,
             const Ahead<C>& ahead, int64_t dim, float* mixed) {
    int64_t d = 0;
    for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes)
        mix_rows<C, R, kVectors>(weights, corrections, values + d, rows, d == 0 ? &ahead : nullptr, dim, mixed + d);
    for (; d < dim; d += kLanes)
        mix_rows<C, R, 1>(weights, corrections, values + d, rows, d == 0 ? &ahead : nullptr, dim, mixed + d);
}

#ifdef HAS_INT16_PAIRS
// Like `mix_rows`, but for 64 dimensions of codes. Weights are integers as well, and one instruction multiplies two
// tokens.
//
//     bytes of tokens t and u = t + 1, interleaved:
//         low    t0 u0 t1 u1 ... t7 u7 | t16 u16 ...    dimensions 0-7, 16-23, ...
//         high   t8 u8 ...             | t24 u24 ...    dimensions 8-15, 24-31, ...
template <int R>
void mix_pairs(const int16_t* weights, const float* weight_scales, const float* corrections, const int8_t* values,
               const TileRows& rows, const Ahead<Int8>* ahead, int64_t dim, float* mixed) {
    __m512i sums[R][4];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_setzero_si512();
    for (int t = 0; t < rows.count; t += 2) {
        const __m512i even = _mm512_loadu_si512(values + rows.offsets[t]);
        const __m512i odd = _mm512_loadu_si512(values + rows.offsets[t + 1]);  // after the last token, its weight is 0
        if (ahead != nullptr) {
            ahead->fetch(t);
            ahead->fetch(t + 1);
        }
        const __m512i low = _mm512_unpacklo_epi8(even, odd), high = _mm512_unpackhi_epi8(even, odd);
        const __m512i value[4] = {_mm512_cvtepi8_epi16(_mm512_castsi512_si256(low)),
                                  _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(low, 1)),
                                  _mm512_cvtepi8_epi16(_mm512_castsi512_si256(high)),
                                  _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(high, 1))};
        for (int r = 0; r < R; ++r) {
            const __m512i weight = broadcast_pair(weights + r * kTile + t);
            for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_dpwssd_epi32(sums[r][v], weight, value[v]);
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < 2; ++v) {
            const __m512i low = sums[r][v], high = sums[r][v + 2];
            const __m512i parts[2] = {_mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1),
                                      _mm512_shuffle_i64x2(low, high, 0xee)};
            for (int i = 0; i < 2; ++i) {
                float* there = mixed + r * dim + (2 * v + i) * kLanes;
                Vec part = reinterpret_cast<Vec>(_mm512_cvtepi32_ps(parts[i]));
                store(there, load(there) * corrections[r] + part * weight_scales[r]);
            }
        }
    }
}

template <int R>
void mix_all_pairs(const float* weights, const float* corrections, const int8_t* values, const TileRows& rows,
                   int padded, const Ahead<Int8>& ahead, int64_t dim, float* mixed) {
    alignas(64) int16_t packed[R * kTile];
    float weight_scales[R];
    for (int r = 0; r < R; ++r)
        weight_scales[r] = pack_int16<Float32>(weights + r * kTile, padded, kTile, packed + r * kTile);
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64)
        mix_pairs<R>(packed, weight_scales, corrections, values + d, rows, d == 0 ? &ahead : nullptr, dim, mixed + d);
    for (; d < dim; d += kLanes)
        mix_rows<Int8, R, 1>(weights, corrections, values + d, rows, d == 0 ? &ahead : nullptr, dim, mixed + d);
}
#endif

#ifdef HAS_BF16_PAIRS
// Interleaves the 16-bit numbers of two rows.
struct Weaver {
    __m512i low, high;

    Weaver() {
        alignas(64) uint16_t low_halves[2 * kLanes], high_halves[2 * kLanes];
        for (int i = 0; i < kLanes; ++i) {
            low_halves[2 * i] = i;
            low_halves[2 * i + 1] = 2 * kLanes + i;
            high_halves[2 * i] = kLanes + i;
            high_halves[2 * i + 1] = 3 * kLanes + i;
        }
        low = _mm512_load_si512(low_halves);
        high = _mm512_load_si512(high_halves);
    }
    // Interleave the first or the last 16 numbers of each row.
    __m512i weave_low(__m512i even, __m512i odd) const { return _mm512_permutex2var_epi16(even, low, odd); }
    __m512i weave_high(__m512i even, __m512i odd) const { return _mm512_permutex2var_epi16(even, high, odd); }
};

// Like `mix_rows`, but for 2 * V vectors of D_v in bfloat16. Weights are bfloat16 as well, and one instruction
// multiplies two tokens.
template <int R, int V>
void mix_halves(const uint16_t* weights, const float* corrections, const uint16_t* values, const TileRows& rows,
                const Ahead<BFloat16>* ahead, int64_t dim, float* mixed) {
    const Weaver weaver;
    __m512 sums[R][2 * V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 2 * V; ++v)
            sums[r][v] = reinterpret_cast<__m512>(load(mixed + r * dim + v * kLanes) * corrections[r]);
    for (int t = 0; t < rows.count; t += 2) {
        const uint16_t* even = values + rows.offsets[t];
        const uint16_t* odd = values + rows.offsets[t + 1];  // after the last token, its weight is 0
        if (ahead != nullptr) {
            ahead->fetch(t);
            ahead->fetch(t + 1);
        }
        __m512bh value[2 * V];
        for (int v = 0; v < V; ++v) {
            const __m512i a = _mm512_loadu_si512(even + v * 2 * kLanes), b = _mm512_loadu_si512(odd + v * 2 * kLanes);
            value[2 * v] = reinterpret_cast<__m512bh>(weaver.weave_low(a, b));
            value[2 * v + 1] = reinterpret_cast<__m512bh>(weaver.weave_high(a, b));
        }
        for (int r = 0; r < R; ++r) {
            const __m512bh weight = reinterpret_cast<__m512bh>(broadcast_pair(weights + r * kTile + t));
            for (int v = 0; v < 2 * V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], weight, value[v]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 2 * V; ++v) store(mixed + r * dim + v * kLanes, reinterpret_cast<Vec>(sums[r][v]));
}
#endif

// Attends with R query rows to one KV head's tile: scores, softmax, weighted sum.
template <class E, class C, int R>
void attend_rows(const typename Dot<E, C>::Query* q, const float* scales, const typename C::Element* keys,
                 const typename C::Element* values, const TileRows& rows, const TileScales& key_scales,
                 const TileScales& value_scales, const Ahead<C>& ahead_keys, const Ahead<C>& ahead_values,
                 const GraftlmLayer& layer, Softmax& softmax, float* mixed) {
    constexpr bool kHalves = std::is_same_v<E, BFloat16> && std::is_same_v<C, BFloat16>;
    alignas(64) float scores[R * kTile];
    alignas(64) uint16_t halves[kHalves ? R * kTile : 1];
    float corrections[R];
    const int64_t dim = layer.value_dim;
    int padded = (rows.count + kLanes - 1) / kLanes * kLanes;
    dot_rows<E, C, R>(q, keys, rows, ahead_keys, layer.head_dim, scores);
    for (int r = 0; r < R; ++r) {
        float* row = scores + r * kTile;
        if (kHasScales<C>) key_scales.multiply(row, padded);
        for (int t = rows.count; t < padded; ++t) row[t] = -kInfinity;
    }
    update_softmax<R>(softmax, scores, padded, layer, scales, corrections, [&](int r, int i, Vec weights) {
        if (kHasScales<C>) weights = weights * value_scales.at(i);
        if constexpr (kHalves) BFloat16::store(halves + r * kTile + i, weights);
        store(scores + r * kTile + i, weights);
    });
#ifdef HAS_BF16_PAIRS
    if constexpr (kHalves) {
        int64_t d = 0;
        for (; d + 64 <= dim; d += 64)
            mix_halves<R, 2>(halves, corrections, values + d, rows, d == 0 ? &ahead_values : nullptr, dim, mixed + d);
        for (; d < dim; d += kLanes)
            mix_rows<C, R, 1>(scores, corrections, values + d, rows, d == 0 ? &ahead_values : nullptr, dim, mixed + d);
        return;
    }
#endif
#ifdef HAS_INT16_PAIRS
    if constexpr (std::is_same_v<E, BFloat16> && std::is_same_v<C, Int8>) {
        mix_all_pairs<R>(scores, corrections, values, rows, padded, ahead_values, dim, mixed);
        return;
    }
#endif
    mix_all<C, R>(scores, corrections, values, rows, ahead_values, dim, mixed);
}

// A piece [start, end) of one token's context, for all heads.
struct QueryTask {
    int64_t request;
    int64_t token;
    int64_t start;
    int64_t end;
    bool has_sinks;  // set for the first piece if the layer has sinks
    float* partial;  // [H, 2 + D_v] if the context is split into pieces, otherwise null
};

// Stores the result of a piece of context for `merge_pieces`; the maximum is in units of ln 2.
inline void write_partial(const GraftlmLayer& layer, float* partial, int64_t head, float maximum, float sum,
                          const float* mixed) {
    partial += head * (layer.value_dim + 2);
    partial[0] = maximum;
    partial[1] = sum;
    std::memcpy(partial + 2, mixed, layer.value_dim * sizeof(float));
}

template <class E>
void write_mixed(const GraftlmLayer& layer, int64_t token, int64_t head, const float* mixed, float sum, void* out) {
    auto* row = static_cast<typename E::Element*>(out) + (token * layer.num_heads + head) * layer.value_dim;
    for (int64_t d = 0; d < layer.value_dim; d += kLanes) E::store(row + d, load(mixed + d) / sum);
}

// Sets the slices of the next tile that are prefetched while `kv_head` is computed. All KV heads together prefetch each
// slice once, in order of address.
template <class C>
void look_ahead(const typename C::Element* base, const uint16_t* scales, const TileRows& next,
                const GraftlmLayer& layer, int64_t kv_head, Ahead<C>& ahead) {
    ahead.elements = layer.head_dim;
    ahead.has_scales = kHasScales<C> && kv_head == 0;  // one prefetch covers the scales of all heads: they are adjacent
    for (int t = 0; ahead.has_scales && t < kTile; ++t) ahead.scales[t] = scales + next.scales[t];
    int64_t row = kv_head * kTile / layer.num_kv_heads, slice = kv_head * kTile % layer.num_kv_heads;
    for (int t = 0; t < kTile; ++t) {
        ahead.slices[t] = base + next.offsets[row] + slice * layer.head_dim;
        if (++slice == layer.num_kv_heads) {
            slice = 0;
            ++row;
        }
    }
}

template <class E, class C>
void attend_query(const GraftlmStep& step, const GraftlmLayer& layer, const QueryTask& task, const GraftlmTensor& q,
                  const float* sinks, void* out, Scratch& scratch) {
    using Element = typename E::Element;
    using Row = typename C::Element;
    const int64_t heads = layer.num_heads, group = heads / layer.num_kv_heads;
    const int64_t dim = layer.head_dim, value_dim = layer.value_dim;
    const bool values_apart = layer.values != layer.keys;
    const auto* keys = static_cast<const Row*>(layer.keys);
    const auto* values = static_cast<const Row*>(layer.values);
    scratch.rewind();
    auto* query = scratch.take<typename Dot<E, C>::Query>(heads * dim);
    float* scales = scratch.take<float>(heads);
    float* mixed = scratch.take<float>(heads * value_dim);
    Softmax* softmax = scratch.take<Softmax>(heads);  // rows that are computed together use the first row's entry
    TileRows* tiles = scratch.take<TileRows>(2);
    // Calls visit(R, h) for the heads of a KV head, R at a time, starting at h.
    const auto for_rows = [&](int64_t kv_head, auto visit) {
        const int64_t end = (kv_head + 1) * group;
        int64_t h = kv_head * group;
        const auto visit_by = [&](auto rows) {
            for (; h + rows <= end; h += rows) visit(rows, h);
        };
        visit_by(std::integral_constant<int, 4>());
        visit_by(std::integral_constant<int, 2>());
        visit_by(std::integral_constant<int, 1>());
    };
    for (int64_t h = 0; h < heads; ++h) {
        const auto* row = static_cast<const Element*>(q.data) + task.token * q.token_stride + h * q.head_stride;
        scales[h] = layer.scale * Dot<E, C>::pack(row, dim, query + h * dim);
        softmax[h] = Softmax();
    }
    for (int64_t kv_head = 0; task.has_sinks && kv_head < layer.num_kv_heads; ++kv_head)
        for_rows(kv_head, [&](auto rows, int64_t h) {
            for (int r = 0; r < rows; ++r) softmax[h].template begin_with_sink<rows()>(r, sinks[h + r]);
        });
    std::memset(mixed, 0, heads * value_dim * sizeof(float));

    Ahead<C> ahead_keys, ahead_values;
    TileScales key_scales, value_scales;
    TileRows *tile = &tiles[0], *next = &tiles[1];
    tile->find(step, layer, task.request, task.start, task.end);
    for (int t = 0; t < tile->count; ++t) {  // prefetches the first tile, because no earlier tile has done so
        prefetch<C>(keys + tile->offsets[t], layer.num_kv_heads * dim);
        if (values_apart) prefetch<C>(values + tile->offsets[t], layer.num_kv_heads * dim);
    }
    for (int64_t start = task.start; start < task.end; start += kTile) {
        const bool more = start + kTile < task.end;
        if (more) next->find(step, layer, task.request, start + kTile, task.end);
        for (int64_t kv_head = 0; kv_head < layer.num_kv_heads; ++kv_head) {
            if (more) look_ahead<C>(keys, layer.key_scales, *next, layer, kv_head, ahead_keys);
            if (more && values_apart) look_ahead<C>(values, layer.value_scales, *next, layer, kv_head, ahead_values);
            if (kHasScales<C>) key_scales.read(layer.key_scales, *tile, kv_head);
            if (kHasScales<C>) value_scales.read(layer.value_scales, *tile, kv_head);
            for_rows(kv_head, [&](auto rows, int64_t h) {
                attend_rows<E, C, rows()>(query + h * dim, scales + h, keys + kv_head * dim, values + kv_head * dim,
                                          *tile, key_scales, value_scales, ahead_keys, ahead_values, layer, softmax[h],
                                          mixed + h * value_dim);
                ahead_keys.stop();  // the first rows have prefetched the slices
                ahead_values.stop();
            });
        }
        std::swap(tile, next);
    }

    for (int64_t kv_head = 0; kv_head < layer.num_kv_heads; ++kv_head)
        for_rows(kv_head, [&](auto rows, int64_t first) {
            for (int r = 0; r < rows; ++r) {
                const int64_t h = first + r;
                const float sum = softmax[first].sum[r * kLanes / rows];
                if (task.partial == nullptr) {
                    write_mixed<E>(layer, task.token, h, mixed + h * value_dim, sum, out);
                    continue;
                }
                write_partial(layer, task.partial, h, softmax[first].maximum[r * kLanes / rows], sum,
                              mixed + h * value_dim);
            }
        });
}

// The merge of one token's pieces.
struct MergeTask {
    int64_t token;
    int64_t pieces;
    float* partials;  // [pieces, H, 2 + D_v]
};

template <class E>
void merge_pieces(const GraftlmLayer& layer, const MergeTask& task, void* out) {
    const int64_t dim = layer.value_dim, stride = layer.num_heads * (dim + 2);
    for (int64_t h = 0; h < layer.num_heads; ++h) {
        float* first = task.partials + h * (dim + 2);
        float maximum = first[0];
        for (int64_t i = 1; i < task.pieces; ++i) maximum = std::max(maximum, first[i * stride]);
        float sum = 0.0f;
        for (int64_t i = 0; i < task.pieces; ++i) {
            float* piece = first + i * stride;
            const float weight = exp2_negative<IntVec>(splat(piece[0] - maximum))[0];
            sum += piece[1] * weight;
            for (int64_t d = 0; d < dim; d += kLanes) {
                Vec scaled = load(piece + 2 + d) * weight;
                store(first + 2 + d, i == 0 ? scaled : load(first + 2 + d) + scaled);
            }
        }
        write_mixed<E>(layer, task.token, h, first + 2, sum, out);
    }
}

}  // namespace
