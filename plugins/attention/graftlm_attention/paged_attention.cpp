// Paged attention on a CPU: writes a batch's keys and values into their pages, then attends over the pages in place.
//
// Two loops share one idea, the online softmax (Milakov & Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135):
//   - `attend_query` reads the context once for a single token's H heads. It is bound by memory, so a task walks whole
//     token rows (all KV heads), and long contexts are cut into pieces that `merge_pieces` joins (flash-decoding).
//     On machines with AMX, `UnitQuery` does the same with its tiles, which read keys and values where they lie.
//   - `attend_block` serves a block of a chunk's tokens for one KV head. It is bound by arithmetic, so it packs keys and
//     values into tiles and multiplies them with one register-blocked kernel, `gemm_rows`; or on machines with AMX, with
//     its tiles: `UnitBlock`.
// Scores, softmax and sums are float32. On machines with AVX512-BF16 all loops multiply pairs of bfloat16, which rounds the
// softmax weights to bfloat16; everywhere else bfloat16 is widened first.
//
// A cache of int8 is multiplied as the codes that it holds, which every type used here holds exactly. A token's scale is
// multiplied into its score, and that of its value into its weight: one multiplication for D of them.
//
// Plain C interface, no dependencies: it compiles in seconds and is loaded with ctypes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "graftlm/matrix_units.h"
#include "vectors.h"

extern "C" {

// One step's batch: B requests, T tokens, P page-table columns. Host pointers, read only.
struct GraftlmStep {
    int64_t num_requests;
    int64_t num_tokens;
    int64_t page_size;
    int64_t table_columns;
    int64_t num_threads;
    const int64_t* out_slots;   // [T]
    const int32_t* query_lens;  // [B]
    const int32_t* seq_lens;    // [B]
    const int32_t* page_table;  // [B, P]
    int32_t use_matrix_units;   // whether queries of bfloat16 may; false is for tests of what other machines do
    // G groups of requests of one token each, which stand at the front of the batch: all of a group begin with the same
    // pages, and none is in two.
    int64_t num_groups;
    const int32_t* group_starts;  // [G + 1], where a group's requests begin among all groups' members
    const int32_t* members;       // indices of requests
    const int32_t* shared_lens;   // [G], tokens that a group has in common, fewer than any of its contexts
};

// One layer's shape and pages. `window` is at least 1; `soft_cap` counts only where `has_soft_cap`. Where `values` is
// `keys`, a value is the first D_v numbers of its key; otherwise D_v is D.
struct GraftlmLayer {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;   // a multiple of 16
    int64_t value_dim;  // likewise, and no larger
    int64_t window;
    int32_t has_soft_cap;
    float soft_cap;
    float scale;
    void* keys;    // [slots, H_kv, D]
    void* values;  // [slots, H_kv, D]
    uint16_t* key_scales;    // [slots, H_kv] bfloat16, where keys and values are int8 codes; else null
    uint16_t* value_scales;  // likewise; `key_scales` where `values` is `keys`
};

// A [T, heads, D] tensor whose last dimension is contiguous; strides in elements.
struct GraftlmTensor {
    void* data;
    int64_t token_stride;
    int64_t head_stride;
};

// Whether queries of bfloat16 are attended on matrix units, where a step lets them be.
int32_t graftlm_has_matrix_units() {
    static const bool has = may_use_matrix_units();
    return has;
}
}

namespace {

#if defined(__AVX512F__)
constexpr int kVectors = 4;  // columns of `gemm_rows`, in vectors, that the number of registers allows
#else
constexpr int kVectors = 2;
#endif
constexpr int kRows = 6;   // rows of `gemm_rows`
constexpr int kPadding = 3 * kLanes;  // a multiple of kRows, too
constexpr int kTile = 64;  // context tokens handled between two updates of the running maximum
constexpr int64_t kBlockRows = 144;       // query rows (tokens x heads of a group) of one chunk task
constexpr int64_t kUnitBlockRows = 384;   // likewise on matrix units, where packing is a greater part of the work
constexpr int64_t kMinUnitBlockRows = 96; // and where there are many threads to share it
constexpr int64_t kPieceTokens = 256;     // a context is not cut into pieces shorter than this
constexpr int64_t kPiecesPerThread = 4;   // how finely the work is cut for balance
constexpr int64_t kSerialTokens = 128;    // below this much context in total, waking threads costs more than it gains
constexpr float kFarBelow = -1e30f;       // a running maximum before its first score: finite, so differences are too

inline int64_t round_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

// ---- online softmax ----------------------------------------------------------------------------------------------

// The running softmax of R rows; the lanes from r * kLanes / R on are row r's. Scores are in units of ln 2, so that weights
// are powers of two.
struct Softmax {
    Vec maximum = splat(kFarBelow);
    Vec sum = {};

    // A sink is a score that has been seen already, of a token whose value is zero.
    template <int R>
    void begin_with_sink(int row, float sink) {
        for (int i = row * kLanes / R; i < (row + 1) * kLanes / R; ++i) {
            maximum[i] = std::max(sink * kLog2E, kFarBelow);
            sum[i] = 1.0f;
        }
    }
};

// Scores times what they are to be multiplied by, which may be 0 or negative; those of -infinity, which nobody sees, stay.
// That choice also keeps compilers from fusing the product with a difference: the largest score's must be 0, not what
// rounding took from it, of which a power of two may be infinite.
inline Vec scaled(Vec scores, float scale) { return scores == -kInfinity ? scores : scores * scale; }

// Turns R rows of kTile scores, which are still to be multiplied by `scales`, into weights relative to the new maxima, which
// `weigh(row, i, weights)` takes, kLanes at a time; only the first `count` of a row are looked at, a multiple of kLanes.
// Sets what earlier sums must be multiplied by. Scores of -infinity become weights of exactly 0.
template <int R, class Weigh>
inline void update_softmax(Softmax& state, float* scores, int count, const GraftlmLayer& layer, const float* scales,
                           float* corrections, Weigh weigh) {
    float units[R];
    Vec best[R], sums[R];
    for (int r = 0; r < R; ++r) {
        float* row = scores + r * kTile;
        units[r] = scales[r] * kLog2E;
        if (layer.has_soft_cap) {
            for (int i = 0; i < count; i += kLanes) {
                Vec s = load(row + i);
                Vec capped = tanh_vec(s * scales[r] / layer.soft_cap) * layer.soft_cap;
                store(row + i, s == -kInfinity ? s : capped);
            }
            units[r] = kLog2E;
        }
        best[r] = splat(kFarBelow);
        for (int i = 0; i < count; i += kLanes) {
            Vec s = scaled(load(row + i), units[r]);
            best[r] = s > best[r] ? s : best[r];
        }
    }
    Vec maximum = max_each(best);
    maximum = maximum > state.maximum ? maximum : state.maximum;
    for (int r = 0; r < R; ++r) {
        const float from = maximum[r * kLanes / R];
        sums[r] = Vec{};
        for (int i = 0; i < count; i += kLanes) {
            Vec p = exp2_negative(scaled(load(scores + r * kTile + i), units[r]) - from);
            sums[r] += p;
            weigh(r, i, p);
        }
    }
    const Vec correction = exp2_negative(state.maximum - maximum);
    state.sum = state.sum * correction + sum_each(sums);
    state.maximum = maximum;
    for (int r = 0; r < R; ++r) corrections[r] = correction[r * kLanes / R];
}

// ---- scratch memory ----------------------------------------------------------------------------------------------

// Grows and is kept by its thread: a step allocates nothing once it is warm.
class Scratch {
public:
    ~Scratch() { std::free(memory_); }
    void reserve(size_t bytes) {
        if (bytes <= size_) return;
        std::free(memory_);
        size_ = (bytes + 63) / 64 * 64;
        memory_ = static_cast<char*>(std::aligned_alloc(64, size_));
        if (memory_ == nullptr) throw std::bad_alloc();
    }
    void rewind() { used_ = 0; }
    template <class T>
    T* take(size_t count) {
        T* start = reinterpret_cast<T*>(memory_ + used_);
        used_ += (count * sizeof(T) + 63) / 64 * 64;
        return start;
    }

private:
    char* memory_ = nullptr;
    size_t size_ = 0;
    size_t used_ = 0;
};

// ---- one token over its context ----------------------------------------------------------------------------------

// Where N context tokens of a request stand in the cache; entries past the last token repeat it.
template <int N>
struct RowsOf {
    int64_t offsets[N];  // elements from the start of the layer's keys or values to the token's row
    int64_t scales[N];   // likewise from the start of their scales
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

// The scales of N tokens' keys or values for one KV head; zeros past the last token.
template <int N>
struct ScalesOf {
    alignas(64) float numbers[N];

    void read(const uint16_t* scales, const RowsOf<N>& rows, int64_t kv_head) {
        for (int t = 0; t < rows.count; ++t) numbers[t] = BFloat16::widen(scales[rows.scales[t] + kv_head]);
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
    for (; line < end; line += 64) __builtin_prefetch(line, 0, 2);
}

// What the memory should fetch while a tile is being worked on: a slice of the next tile for each of its tokens. Spread
// over the arithmetic like this the fetches overlap it; issued together they would fill the miss buffers and stall it.
template <class C>
struct Ahead {
    const typename C::Element* slices[kTile];
    const uint16_t* scales[kTile];
    int64_t elements = 0;     // per slice; 0 when there is nothing to fetch
    bool has_scales = false;  // whether `scales` are to be fetched, too

    void fetch(int t) const {
        prefetch<C>(slices[t], elements);
        if (kHasScales<C> && has_scales) __builtin_prefetch(scales[t], 0, 2);
    }
    void stop() {
        elements = 0;
        has_scales = false;
    }
};

// How one token's queries, of type E, and keys, of type C, are multiplied: widened to float, or in pairs. `pack` returns
// what the products have to be multiplied by.
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
// Turns a row into integers of 16 bits, relative to its largest magnitude, and returns their scale, which is NaN if there
// is one. The sum of `count` products of them and codes stays inside 32 bits.
template <class E>
inline float pack_int16(const typename E::Element* row, int64_t dim, int64_t count, int16_t* out) {
    const float bound = std::min(32767.0f, 2147483000.0f / (127.0f * count) - 1.0f);
    const float scale = largest_magnitude<E>(row, dim) / bound;
    for (int64_t d = 0; d < dim; d += kLanes) {
        Vec x = E::load(row + d) / scale;
        x = x == x ? clamp(x, bound) : Vec{};
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d),
                            _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(round_to_int(x))));
    }
    return scale;
}

// Queries of bfloat16 keep their 8 significant bits as integers, but in numbers far smaller than the largest. Products of
// pairs are exact, and half as many instructions as in float.
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

// scores[r][t] = q[r] . k[t] for R rows of one KV head; R * (tokens at once) fills a vector.
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
// As `mix_rows`, for 64 dimensions of codes: weights as integers too, and two tokens in one multiplication.
//
//     bytes of tokens t and t + 1, woven:   low    t0 u0 t1 u1 ... t7 u7 | t16 u16 ...    dimensions 0-7, 16-23, ...
//                                           high   t8 u8 ...             | t24 u24 ...    dimensions 8-15, 24-31, ...
template <int R>
void mix_pairs(const int16_t* weights, const float* weight_scales, const float* corrections, const int8_t* values,
               const TileRows& rows, const Ahead<Int8>* ahead, int64_t dim, float* mixed) {
    __m512i sums[R][4];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_setzero_si512();
    for (int t = 0; t < rows.count; t += 2) {
        const __m512i even = _mm512_loadu_si512(values + rows.offsets[t]);
        const __m512i odd = _mm512_loadu_si512(values + rows.offsets[t + 1]);  // of weight 0 past the last
        if (ahead != nullptr) {
            ahead->fetch(t);
            ahead->fetch(t + 1);
        }
        const __m512i low = _mm512_unpacklo_epi8(even, odd), high = _mm512_unpackhi_epi8(even, odd);
        const __m512i value[4] = {
            _mm512_cvtepi8_epi16(_mm512_castsi512_si256(low)), _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(low, 1)),
            _mm512_cvtepi8_epi16(_mm512_castsi512_si256(high)), _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(high, 1))};
        for (int r = 0; r < R; ++r) {
            int32_t pair;
            std::memcpy(&pair, weights + r * kTile + t, 4);
            for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_dpwssd_epi32(sums[r][v], _mm512_set1_epi32(pair), value[v]);
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
// Makes neighbours of two rows' halves that have the same index.
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
    // The first or the last 16 of each row.
    __m512i weave_low(__m512i even, __m512i odd) const { return _mm512_permutex2var_epi16(even, low, odd); }
    __m512i weave_high(__m512i even, __m512i odd) const { return _mm512_permutex2var_epi16(even, high, odd); }
};

// As `mix_rows`, for 2 * V vectors of D_v in bfloat16: weights likewise, and two tokens in one multiplication.
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
        const uint16_t* odd = values + rows.offsets[t + 1];  // of weight 0 past the last
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
            int32_t pair;
            std::memcpy(&pair, weights + r * kTile + t, 4);
            const __m512bh weight = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
            for (int v = 0; v < 2 * V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], weight, value[v]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 2 * V; ++v) store(mixed + r * dim + v * kLanes, reinterpret_cast<Vec>(sums[r][v]));
}
#endif

// One KV head's tile for R query rows: scores, softmax, weighted sum.
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
    bool has_sinks;  // the first piece has, where the layer has
    float* partial;  // [H, 2 + D_v] when the context is cut into pieces, else null
};

// Keeps what a piece of a context came to, for `merge_pieces`; the maximum in units of ln 2.
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

// Shares the next tile's rows out among the KV heads: in order of address, each slice once.
template <class C>
void look_ahead(const typename C::Element* base, const uint16_t* scales, const TileRows& next,
                const GraftlmLayer& layer, int64_t kv_head, Ahead<C>& ahead) {
    ahead.elements = layer.head_dim;
    ahead.has_scales = kHasScales<C> && kv_head == 0;  // of all heads, which lie side by side
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
    Softmax* softmax = scratch.take<Softmax>(heads);  // of the rows that are handled together, in the first one's place
    TileRows* tiles = scratch.take<TileRows>(2);
    // Calls visit(R, h) for the heads of a KV head, R from h on at a time.
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
    for (int t = 0; t < tile->count; ++t) {  // nothing has asked for the first tile
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
                attend_rows<E, C, rows()>(query + h * dim, scales + h, keys + kv_head * dim, values + kv_head * dim, *tile,
                                          key_scales, value_scales, ahead_keys, ahead_values, layer, softmax[h],
                                          mixed + h * value_dim);
                ahead_keys.stop();  // the first rows have asked for it
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

// The pieces of one token, [pieces, H, 2 + D_v].
struct MergeTask {
    int64_t token;
    int64_t pieces;
    float* partials;
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
            const float weight = exp2_negative(splat(piece[0] - maximum))[0];
            sum += piece[1] * weight;
            for (int64_t d = 0; d < dim; d += kLanes) {
                Vec scaled = load(piece + 2 + d) * weight;
                store(first + 2 + d, i == 0 ? scaled : load(first + 2 + d) + scaled);
            }
        }
        write_mixed<E>(layer, task.token, h, first + 2, sum, out);
    }
}

// ---- a block of a chunk's tokens ---------------------------------------------------------------------------------

// How a chunk's numbers are packed into 32-bit words for `gemm_rows`: one float each, or a pair of bfloat16.
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
            for (int v = 0; v < V; ++v)
                sums[r][v] = Words::multiply_add(sums[r][v], a[r * a_stride + i], column[v]);
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
            gemm_rows<Words, kVectors>(a + r * a_stride, a_stride, b + j, b_stride, depth, scale, c + r * columns + j, columns);
        for (; j < columns; j += kLanes)
            gemm_rows<Words, 1>(a + r * a_stride, a_stride, b + j, b_stride, depth, scale, c + r * columns + j, columns);
    }
}

#ifdef HAS_BF16_PAIRS
// Transposes 16 rows of 16 words: first within 128 bits, then the 128 bits themselves.
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
        const __m512i c = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0x88), d = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0xdd);
        x[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        x[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        x[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}
#endif

// How queries and weights, of type E, and keys and values, of type C, become words. Tokens past the tile's last are zeros.
// `buffer` has room for two rows.
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
    // [D / 2][kTile], a word holds dimensions 2i and 2i + 1
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
    // [kTile / 2][D], a word holds tokens 2i and 2i + 1
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

// What requests that begin with the same pages have of them: the same context [start, end), and a place each for what it
// came to.
struct SharedPiece {
    const int32_t* members;  // indices of requests, and of their tokens
    float* const* partials;
    int64_t start, end;
};

// `count` tokens and one KV head: tokens of a request's chunk, or of requests that share a piece of context.
struct BlockTask {
    int64_t request;  // whose page table counts
    int64_t kv_head;
    int64_t token;     // of a chunk: index in the batch of the block's first token
    int64_t position;  // and its position in the context
    int64_t count;
    const SharedPiece* shared;  // null for a chunk
    int64_t first_member;

    int64_t token_of(int64_t i) const { return shared ? shared->members[first_member + i] : token + i; }
    // A token sees what stands at its position and before.
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

#ifdef HAS_MATRIX_UNITS

// ---- the same on matrix units ------------------------------------------------------------------------------------

// A block packs kSpan context tokens at a time. Its rows go through them in panels of 32, whose scores and weights stay in
// the innermost cache. Numbers are pairs of bfloat16, along the depth of each product; a tile of keys or values is contiguous:
//
//     scores [32][kSpan]   =  queries [32][D / 2]     . keys   [kSpan / 16][D / 2][16]
//     mixed  [32][D_v]    +=  weights [32][kSpan / 2] . values [D_v / 16][kSpan / 2][16]
//
// D / 2 is rounded up to whole tiles. What is past a row's or the context's end is zero on both sides.

constexpr int kSpan = 256;
constexpr int kUnit = TILE;        // rows of a tile, and also its words and the lanes of a vector
constexpr int kPanel = 2 * kUnit;  // rows of a panel, and also context tokens of the product with weights

static_assert(kUnit == kLanes && kUnit * PAIR == TILE_INPUTS && kSpan % kPanel == 0);

using SpanRows = RowsOf<kSpan>;
using SpanScales = ScalesOf<kSpan>;

// The next 32 numbers of a row as bfloat16; where no more than 16 are left, zeros follow.
template <class C>
inline __m512i load_halves(const typename C::Element* p, int64_t left) {
    if constexpr (kHasScales<C>) {
        const __m512 low = reinterpret_cast<__m512>(C::load(p));
        const __m512 high = left >= kPanel ? reinterpret_cast<__m512>(C::load(p + kUnit)) : _mm512_setzero_ps();
        return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    } else {
        return _mm512_maskz_loadu_epi16(left >= kPanel ? 0xffffffff : 0xffff, p);
    }
}

// Copies a query's row, times the sign of `scale`: weights can then count on a scale that is not negative, and on the
// largest score being the largest weight.
inline void pack_query(const uint16_t* row, int64_t dim, float scale, uint16_t* out) {
    for (int64_t d = 0; d < dim; d += kLanes) {
        const Vec numbers = BFloat16::load(row + d);
        BFloat16::store(out + d, scale == 0.0f ? numbers * 0.0f : scale < 0.0f ? -numbers : numbers);
    }
}

// `ahead` are the rows that will be packed next: asked for one by one, they arrive while these are being worked on.
template <class C>
void pack_keys(const typename C::Element* base, const SpanRows& rows, const SpanRows* ahead, int64_t dim, int64_t depth,
               uint32_t* out) {
    for (int t = 0; t < round_up(rows.count, kPanel); t += kUnit) {
        for (int j = 0; ahead != nullptr && j < kUnit; ++j) prefetch<C>(base + ahead->offsets[t + j], dim);
        for (int64_t i = 0; i < depth; i += kUnit, out += kUnit * kUnit) {
            __m512i words[kUnit];
            for (int j = 0; j < kUnit; ++j) {
                words[j] = _mm512_setzero_si512();
                if (t + j < rows.count) words[j] = load_halves<C>(base + rows.offsets[t + j] + 2 * i, dim - 2 * i);
            }
            transpose(words);
            for (int j = 0; j < kUnit; ++j) _mm512_store_si512(out + j * kUnit, words[j]);
        }
    }
}

template <class C>
void pack_values(const typename C::Element* base, const SpanRows& rows, const SpanRows* ahead, int64_t dim,
                 uint32_t* out) {
    const Weaver weaver;
    for (int t = 0; t < round_up(rows.count, kPanel); t += 2) {
        for (int j = 0; ahead != nullptr && j < 2; ++j) prefetch<C>(base + ahead->offsets[t + j], dim);
        for (int64_t d = 0; d < dim; d += kPanel) {
            __m512i even = _mm512_setzero_si512(), odd = _mm512_setzero_si512();
            if (t < rows.count) even = load_halves<C>(base + rows.offsets[t] + d, dim - d);
            if (t + 1 < rows.count) odd = load_halves<C>(base + rows.offsets[t + 1] + d, dim - d);
            uint32_t* there = out + (d * (kSpan / 2) + t / 2 * kUnit);
            _mm512_store_si512(there, weaver.weave_low(even, odd));
            if (dim - d >= kPanel) _mm512_store_si512(there + kSpan / 2 * kUnit, weaver.weave_high(even, odd));
        }
    }
}

// c = a . b, or c += a . b, for R tiles of rows and V of columns, whose `depth` is in words: a [R * 16][depth], rows
// `a_stride` words apart; b [V][depth][16], tiles of columns `b_stride` words apart; c [R * 16][V * 16], rows `c_stride` apart.
template <int R, int V>
inline void multiply_few(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t depth,
                         bool add, float* c, int64_t c_stride) {
    const uint32_t *a_below = a + kUnit * a_stride, *b_beside = b + b_stride;
    float *c_beside = c + kUnit, *c_below = c + kUnit * c_stride, *c_last = c_below + kUnit;
    if (add) {
        load_tile<0>(c, c_stride);
        if constexpr (V > 1) load_tile<1>(c_beside, c_stride);
        if constexpr (R > 1) load_tile<2>(c_below, c_stride);
        if constexpr (R > 1 && V > 1) load_tile<3>(c_last, c_stride);
    } else {
        zero_tile<0>();
        if constexpr (V > 1) zero_tile<1>();
        if constexpr (R > 1) zero_tile<2>();
        if constexpr (R > 1 && V > 1) zero_tile<3>();
    }
    for (int64_t i = 0; i < depth; i += kUnit) {
        load_tile<4>(a + i, a_stride);
        load_tile<6>(b + i * kUnit);
        multiply_tiles<0, 4, 6>();
        if constexpr (V > 1) {
            load_tile<7>(b_beside + i * kUnit);
            multiply_tiles<1, 4, 7>();
        }
        if constexpr (R > 1) {
            load_tile<5>(a_below + i, a_stride);
            multiply_tiles<2, 5, 6>();
        }
        if constexpr (R > 1 && V > 1) multiply_tiles<3, 5, 7>();
    }
    store_tile<0>(c, c_stride);
    if constexpr (V > 1) store_tile<1>(c_beside, c_stride);
    if constexpr (R > 1) store_tile<2>(c_below, c_stride);
    if constexpr (R > 1 && V > 1) store_tile<3>(c_last, c_stride);
}

// As `multiply_few`, for 16 or 32 rows and any number of columns that is a multiple of 16.
inline void multiply_panel(int64_t rows, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                           int64_t depth, bool add, float* c, int64_t c_stride, int64_t columns) {
    const auto multiply = [&](auto row_tiles) {
        int64_t j = 0;
        for (; j + 2 * kUnit <= columns; j += 2 * kUnit, b += 2 * b_stride)
            multiply_few<row_tiles, 2>(a, a_stride, b, b_stride, depth, add, c + j, c_stride);
        if (j < columns) multiply_few<row_tiles, 1>(a, a_stride, b, b_stride, depth, add, c + j, c_stride);
    };
    if (rows > kUnit)
        multiply(std::integral_constant<int, 2>());
    else
        multiply(std::integral_constant<int, 1>());
}

// 2^x for x <= 0 to 3e-6 of it, far less than rounding to bfloat16 takes, by a polynomial of least error that is 1 at 0;
// NaN stays NaN.
inline __m512 weight_of(__m512 x) {
    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);  // x less the integer below; 0 for -infinity
    __m512 p = _mm512_set1_ps(1.342668672e-2f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.224246961e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.412802075e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.930448444e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);
}

// The running softmax of 16 rows, whose maximum is in units of scores.
struct UnitSoftmax {
    Vec maximum = splat(kFarBelow);
    Vec sum = {};
};

// Turns scores [low, high) of no more than 16 rows, which begin kStride apart, into weights, 2^(unit * (score - maximum)) for
// the row's new maximum; `write(row, i, even, odd)` takes 32 of them, from i on. Returns whether any maximum has changed: if
// so, earlier sums must be multiplied by `corrections`.
template <int kStride, class Write>
bool weigh_scores(UnitSoftmax& state, const float* scores, int rows, int low, int high, float unit, float* corrections,
                  Write write) {
    Vec best[kUnit], sums[kUnit];
    for (int r = rows; r < kUnit; ++r) best[r] = splat(kFarBelow), sums[r] = Vec{};
    for (int r = 0; r < rows; ++r) {
        const float* row = scores + r * kStride;
        __m512 even = _mm512_set1_ps(kFarBelow), odd = even;
        for (int t = low; t < high; t += kPanel) {
            even = _mm512_max_ps(_mm512_load_ps(row + t), even);  // of a NaN and a number, the second
            odd = _mm512_max_ps(_mm512_load_ps(row + t + kUnit), odd);
        }
        best[r] = reinterpret_cast<Vec>(_mm512_max_ps(even, odd));
    }
    Vec maximum = max_each(best);
    maximum = maximum > state.maximum ? maximum : state.maximum;
    const __m512 units = _mm512_set1_ps(unit);
    for (int r = 0; r < rows; ++r) {
        const float* row = scores + r * kStride;
        const __m512 from = _mm512_set1_ps(maximum[r]);
        // The difference comes first: the largest score's is 0, however large scores are.
        const auto weigh = [&](const float* p) {
            return weight_of(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(p), from), units));
        };
        __m512 even_sum = _mm512_setzero_ps(), odd_sum = _mm512_setzero_ps();
        for (int t = low; t < high; t += kPanel) {
            const __m512 even = weigh(row + t), odd = weigh(row + t + kUnit);
            even_sum = _mm512_add_ps(even_sum, even);
            odd_sum = _mm512_add_ps(odd_sum, odd);
            write(r, t, even, odd);
        }
        sums[r] = reinterpret_cast<Vec>(_mm512_add_ps(even_sum, odd_sum));
    }
    const Vec correction = exp2_negative((state.maximum - maximum) * unit);
    const IntVec changed = maximum != state.maximum;
    state.sum = state.sum * correction + sum_each(sums);
    state.maximum = maximum;
    store(corrections, correction);
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(changed)) != 0;
}

// A block of queries in bfloat16 on matrix units.
template <class C>
class UnitBlock {
public:
    using Row = typename C::Element;

    UnitBlock(const GraftlmStep& step, const GraftlmLayer& layer, const BlockTask& task, Scratch& scratch)
        : step_(step), layer_(layer), task_(task), group_(layer.num_heads / layer.num_kv_heads),
          count_(task.count * group_), rows_(round_up(count_, kUnit)), depth_(round_up(layer.head_dim / 2, kUnit)) {
        scratch.rewind();
        query_ = scratch.take<uint32_t>(rows_ * depth_);
        keys_ = scratch.take<uint32_t>(depth_ * kSpan);
        values_ = scratch.take<uint32_t>(kSpan / 2 * layer.value_dim);
        weights_ = scratch.take<uint16_t>(kPanel * kSpan);
        scores_ = scratch.take<float>(kPanel * kSpan);
        mixed_ = scratch.take<float>(rows_ * layer.value_dim);
        softmax_ = scratch.take<UnitSoftmax>(rows_ / kUnit);
        spans_ = scratch.take<SpanRows>(2);
        const float scale = layer.scale == 0.0f ? 1.0f : std::fabs(layer.scale);  // its sign is in the query
        cap_scale_ = scale / layer.soft_cap;
        unit_ = (layer.has_soft_cap ? layer.soft_cap : scale) * kLog2E;
    }

    static size_t scratch_bytes(const GraftlmLayer& layer) {
        const size_t group = layer.num_heads / layer.num_kv_heads, dim = layer.value_dim;
        const size_t rows = round_up(std::max<size_t>(kUnitBlockRows, group), kUnit);  // a block is at least one token
        const size_t depth = round_up(layer.head_dim / 2, kUnit);
        return 4 * (rows * depth + kSpan * depth + kSpan / 2 * dim + rows * dim) + 6 * kPanel * kSpan +
               rows / kUnit * sizeof(UnitSoftmax) + 2 * sizeof(SpanRows);
    }

    void attend(const GraftlmTensor& q, const float* sinks, void* out) {
        begin(q);
        const int64_t dim = layer_.head_dim, value_dim = layer_.value_dim;
        const auto* keys = static_cast<const Row*>(layer_.keys) + task_.kv_head * dim;
        const auto* values = static_cast<const Row*>(layer_.values) + task_.kv_head * dim;
        const int64_t first = task_.start(layer_.window), last = task_.end();
        SpanRows *span = &spans_[0], *next = &spans_[1];
        span->find(step_, layer_, task_.request, first, last);
        for (int64_t start = first; start < last; start += kSpan) {
            const bool more = start + kSpan < last;
            if (more) next->find(step_, layer_, task_.request, start + kSpan, last);
            pack_keys<C>(keys, *span, more ? next : nullptr, dim, depth_, keys_);
            pack_values<C>(values, *span, more ? next : nullptr, value_dim, values_);
            if (kHasScales<C>) key_scales_.read(layer_.key_scales, *span, task_.kv_head);
            if (kHasScales<C>) value_scales_.read(layer_.value_scales, *span, task_.kv_head);
            for (int64_t top = 0; top < rows_; top += kPanel) attend_panel(top, start, span->count);
            std::swap(span, next);
        }
        end(sinks, out);
    }

private:
    // The oldest and the newest position that a row's token sees. Row i * group + g is head g of the block's token i.
    int64_t oldest_of(int64_t row) const { return task_.oldest_of(std::min(row, count_ - 1) / group_, layer_.window); }
    int64_t position_of(int64_t row) const { return task_.position_of(std::min(row, count_ - 1) / group_); }

    void begin(const GraftlmTensor& q) {
        std::memset(query_, 0, rows_ * depth_ * sizeof(*query_));
        std::memset(mixed_, 0, rows_ * layer_.value_dim * sizeof(*mixed_));
        std::fill(softmax_, softmax_ + rows_ / kUnit, UnitSoftmax());
        for (int64_t r = 0; r < count_; ++r) {
            const int64_t token = task_.token_of(r / group_), head = task_.kv_head * group_ + r % group_;
            pack_query(static_cast<const uint16_t*>(q.data) + token * q.token_stride + head * q.head_stride,
                       layer_.head_dim, layer_.scale, reinterpret_cast<uint16_t*>(query_ + r * depth_));
        }
    }

    // Rows [top, top + 32), or as many as there are, and the span's `count` tokens from position `start` on.
    void attend_panel(int64_t top, int64_t start, int count) {
        const int64_t height = std::min<int64_t>(kPanel, rows_ - top), dim = layer_.value_dim;
        const int64_t newest = position_of(top + height - 1);
        const int low = std::clamp<int64_t>(oldest_of(top) - start, 0, kSpan) / kPanel * kPanel;
        const int high = round_up(std::clamp<int64_t>(newest + 1 - start, 0, count), kPanel);
        if (low >= high) return;
        multiply_panel(height, query_ + top * depth_, depth_, keys_ + low * depth_, depth_ * kUnit, depth_, false,
                       scores_ + low, kSpan, high - low);
        const bool all_seen = oldest_of(top + height - 1) <= start + low && position_of(top) >= start + high - 1;
        for (int64_t r = 0; r < height && !(all_seen && are_final()); ++r)
            finish_scores(scores_ + r * kSpan, oldest_of(top + r) - start, position_of(top + r) - start, low, high);
        for (int64_t r = 0; r < height; r += kUnit) {
            alignas(64) float corrections[kUnit];
            const auto write = [&](int row, int t, __m512 even, __m512 odd) {
                if (kHasScales<C>) {
                    even = _mm512_mul_ps(even, reinterpret_cast<__m512>(value_scales_.at(t)));
                    odd = _mm512_mul_ps(odd, reinterpret_cast<__m512>(value_scales_.at(t + kUnit)));
                }
                _mm512_store_si512(weights_ + (r + row) * kSpan + t,
                                   reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even)));
            };
            if (weigh_scores<kSpan>(softmax_[(top + r) / kUnit], scores_ + r * kSpan, kUnit, low, high, unit_, corrections,
                                    write))
                correct(mixed_ + (top + r) * dim, corrections);
        }
        multiply_panel(height, reinterpret_cast<const uint32_t*>(weights_ + low), kSpan / 2, values_ + low / 2 * kUnit,
                       kSpan / 2 * kUnit, (high - low) / 2, true, mixed_ + top * dim, dim, dim);
    }

    // Whether products are scores already, but for what nobody sees.
    bool are_final() const { return !kHasScales<C> && !layer_.has_soft_cap; }

    // What is left to do to a row's products, and -infinity for what its token does not see: it sees the span's positions
    // from `oldest` to `own`.
    void finish_scores(float* row, int64_t oldest, int64_t own, int low, int high) const {
        if (kHasScales<C>)
            for (int t = low; t < high; t += kLanes) store(row + t, load(row + t) * key_scales_.at(t));
        if (layer_.has_soft_cap)  // which `unit_` multiplies by
            for (int t = low; t < high; t += kLanes) store(row + t, tanh_vec(load(row + t) * cap_scale_));
        const int64_t seen = std::clamp<int64_t>(oldest, low, high);
        const int64_t unseen = std::clamp<int64_t>(own + 1, seen, high);
        std::fill(row + low, row + seen, -kInfinity);
        std::fill(row + unseen, row + high, -kInfinity);
    }

    void correct(float* mixed, const float* corrections) const {
        for (int r = 0; r < kUnit; ++r, mixed += layer_.value_dim)
            for (int64_t d = 0; d < layer_.value_dim; d += kLanes) store(mixed + d, load(mixed + d) * corrections[r]);
    }

    void end(const float* sinks, void* out) const {
        for (int64_t r = 0; r < count_; ++r) {
            const int64_t head = task_.kv_head * group_ + r % group_;
            const UnitSoftmax& state = softmax_[r / kUnit];
            const float* mixed = mixed_ + r * layer_.value_dim;
            float sum = state.sum[r % kUnit];
            if (task_.shared) {
                write_partial(layer_, task_.partial_of(r / group_), head, state.maximum[r % kUnit] * unit_, sum, mixed);
                continue;
            }
            // A sink is the score of a token whose value is zero.
            if (sinks != nullptr) sum += std::exp2(sinks[head] * kLog2E - state.maximum[r % kUnit] * unit_);
            write_mixed<BFloat16>(layer_, task_.token_of(r / group_), head, mixed, sum, out);
        }
    }

    const GraftlmStep& step_;
    const GraftlmLayer& layer_;
    const BlockTask& task_;
    const int64_t group_, count_, rows_, depth_;
    float unit_, cap_scale_;
    uint32_t *query_, *keys_, *values_;
    uint16_t* weights_;
    float *scores_, *mixed_;
    UnitSoftmax* softmax_;
    SpanRows* spans_;
    SpanScales key_scales_, value_scales_;
};

// ---- one token on matrix units -----------------------------------------------------------------------------------

// Context tokens are the rows of tiles, 16 at a time, and lie in their pages as tiles are loaded: nothing but queries and
// weights is packed. The pairs of both products are neighbours in a token's row:
//
//     scores [16 tokens][16 heads]      =  keys [16 tokens][D / 2]   . queries [D / 2][16 heads]
//     mixed  [8 heads, 2][D_v / 2]     +=  weights [8 heads, 2][16]  . values [16 tokens][D_v / 2]
//
// A weight w is there twice, as the pairs (w, 0) and (0, w): one adds up even dimensions, the other odd ones. Of the heads
// that share keys, 16 or 8 at a time may be fewer; memory, not arithmetic, is what this waits for.

constexpr int kUnits = kTile / kUnit;  // blocks of 16 tokens in a tile of context
constexpr int kWeighed = kUnit / 2;    // heads of a tile of weights
constexpr int kAheadBytes = 10240;     // how much is asked for before it is needed: what the innermost cache has room for

static_assert(kTile % kPanel == 0);

// Where 16 rows begin, and how many words apart they are.
struct UnitRows {
    const uint16_t* first;
    int64_t stride;
};

// products[t][h] = keys[t] . queries[h] for kBlocks blocks of 16 tokens; queries are `depth` words deep. Calls fetch(b, i, n)
// for the i-th of n tiles of block b.
template <int kBlocks, class Fetch>
inline void multiply_keys(const UnitRows* keys, const uint32_t* queries, int64_t depth, float* products, Fetch fetch) {
    zero_tile<0>();
    if constexpr (kBlocks > 1) zero_tile<1>();
    if constexpr (kBlocks > 2) zero_tile<2>();
    if constexpr (kBlocks > 3) zero_tile<3>();
    for (int64_t i = 0; i < depth; i += kUnit) {
        load_tile<7>(queries + i * kUnit);
        load_tile<4>(keys[0].first + 2 * i, keys[0].stride);
        fetch(0, i / kUnit, depth / kUnit);
        multiply_tiles<0, 4, 7>();
        if constexpr (kBlocks > 1) {
            load_tile<5>(keys[1].first + 2 * i, keys[1].stride);
            fetch(1, i / kUnit, depth / kUnit);
            multiply_tiles<1, 5, 7>();
        }
        if constexpr (kBlocks > 2) {
            load_tile<6>(keys[2].first + 2 * i, keys[2].stride);
            fetch(2, i / kUnit, depth / kUnit);
            multiply_tiles<2, 6, 7>();
        }
        if constexpr (kBlocks > 3) {
            load_tile<4>(keys[3].first + 2 * i, keys[3].stride);
            fetch(3, i / kUnit, depth / kUnit);
            multiply_tiles<3, 4, 7>();
        }
    }
    store_tile<0>(products, kUnit);
    if constexpr (kBlocks > 1) store_tile<1>(products + kUnit * kUnit, kUnit);
    if constexpr (kBlocks > 2) store_tile<2>(products + 2 * kUnit * kUnit, kUnit);
    if constexpr (kBlocks > 3) store_tile<3>(products + 3 * kUnit * kUnit, kUnit);
}

// mixed += weights . values for `blocks` blocks of 16 tokens and kTiles tiles of 32 dimensions from `d` on. Calls
// fetch(b, i) for the i-th tile of block b.
template <int kTiles, class Fetch>
inline void multiply_values(const uint32_t* weights, const UnitRows* values, int blocks, int64_t d, float* mixed,
                            Fetch fetch) {
    load_tile<0>(mixed);
    if constexpr (kTiles > 1) load_tile<1>(mixed + kUnit * kUnit);
    if constexpr (kTiles > 2) load_tile<2>(mixed + 2 * kUnit * kUnit);
    if constexpr (kTiles > 3) load_tile<3>(mixed + 3 * kUnit * kUnit);
    for (int b = 0; b < blocks; ++b) {
        const uint16_t* first = values[b].first + d;
        load_tile<4>(weights + b * kUnit * kUnit);
        load_tile<5>(first, values[b].stride);
        fetch(b, d / kPanel + 0);
        multiply_tiles<0, 4, 5>();
        if constexpr (kTiles > 1) {
            load_tile<6>(first + kPanel, values[b].stride);
            fetch(b, d / kPanel + 1);
            multiply_tiles<1, 4, 6>();
        }
        if constexpr (kTiles > 2) {
            load_tile<7>(first + 2 * kPanel, values[b].stride);
            fetch(b, d / kPanel + 2);
            multiply_tiles<2, 4, 7>();
        }
        if constexpr (kTiles > 3) {
            load_tile<5>(first + 3 * kPanel, values[b].stride);
            fetch(b, d / kPanel + 3);
            multiply_tiles<3, 4, 5>();
        }
    }
    store_tile<0>(mixed, kUnit);
    if constexpr (kTiles > 1) store_tile<1>(mixed + kUnit * kUnit, kUnit);
    if constexpr (kTiles > 2) store_tile<2>(mixed + 2 * kUnit * kUnit, kUnit);
    if constexpr (kTiles > 3) store_tile<3>(mixed + 3 * kUnit * kUnit, kUnit);
}

// Asks for memory, for the innermost cache. Assembly, since compilers take a function that does nothing else for one that does
// nothing.
inline void fetch_lines(const void* start, int64_t bytes) {
    const char* line = static_cast<const char*>(start);
    for (const char* end = line + bytes; line < end; line += 64) asm volatile("prefetcht0 %0" ::"m"(*line));
}

// Writes products [16 tokens][16] of `heads` heads as rows of scores, which begin kTile apart.
inline void spread_products(const float* products, int64_t heads, float* scores) {
    for (int64_t h = 0; h < heads; h += 4) {
        __m512 x[4];  // of tokens i, 4 + i, 8 + i and 12 + i
        for (int i = 0; i < 4; ++i) {
            const float* row = products + i * kUnit + h;
            x[i] = _mm512_castps128_ps512(_mm_load_ps(row));
            x[i] = _mm512_mask_broadcast_f32x4(x[i], 0x00f0, _mm_load_ps(row + 4 * kUnit));
            x[i] = _mm512_mask_broadcast_f32x4(x[i], 0x0f00, _mm_load_ps(row + 8 * kUnit));
            x[i] = _mm512_mask_broadcast_f32x4(x[i], 0xf000, _mm_load_ps(row + 12 * kUnit));
        }
        const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1]));
        const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
        const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3]));
        const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
        float* row = scores + h * kTile;
        _mm512_store_pd(row, _mm512_unpacklo_pd(a, c));
        if (h + 1 < heads) _mm512_store_pd(row + kTile, _mm512_unpackhi_pd(a, c));
        if (h + 2 < heads) _mm512_store_pd(row + 2 * kTile, _mm512_unpacklo_pd(b, d));
        if (h + 3 < heads) _mm512_store_pd(row + 3 * kTile, _mm512_unpackhi_pd(b, d));
    }
}

// One token's queries in bfloat16 over a piece of its context.
template <class C>
class UnitQuery {
public:
    using Row = typename C::Element;

    UnitQuery(const GraftlmStep& step, const GraftlmLayer& layer, const QueryTask& task, Scratch& scratch)
        : step_(step), layer_(layer), task_(task), kv_heads_(layer.num_kv_heads), group_(layer.num_heads / kv_heads_),
          depth_(layer.head_dim / 2), panels_(panels_of(group_, kUnit)), shares_(panels_of(group_, kWeighed)),
          keys_(static_cast<const Row*>(layer.keys)), values_(static_cast<const Row*>(layer.values)) {
        scratch.rewind();
        query_ = scratch.take<uint32_t>(kv_heads_ * panels_ * depth_ * kUnit);
        weights_ = scratch.take<uint32_t>(kv_heads_ * shares_ * kUnits * kUnit * kUnit);
        mixed_ = scratch.take<float>(kv_heads_ * shares_ * mixed_size());
        scores_ = scratch.take<float>(layer.num_heads * kTile);
        products_ = scratch.take<float>(kTile * kUnit);
        softmax_ = scratch.take<UnitSoftmax>(panels_of(layer.num_heads, kUnit));
        value_scales_ = scratch.take<TileScales>(kHasScales<C> ? kv_heads_ : 0);
        gathered_ = scratch.take<uint16_t>(kTile * layer.head_dim);
        tiles_ = scratch.take<TileRows>(2);
        const float scale = layer.scale == 0.0f ? 1.0f : std::fabs(layer.scale);  // its sign is in the query
        cap_scale_ = scale / layer.soft_cap;
        unit_ = (layer.has_soft_cap ? layer.soft_cap : scale) * kLog2E;
    }

    // Whether rows are whole tiles, and tiles do more than vectors: for heads that share keys. Codes have to be converted,
    // which many heads must share; and so must tokens what is done once for a piece.
    static bool suits(const GraftlmLayer& layer, const QueryTask& task) {
        const int64_t least = kHasScales<C> ? kUnit : 2;
        return layer.head_dim % kPanel == 0 && layer.value_dim % kPanel == 0 &&
               layer.num_heads >= least * layer.num_kv_heads && task.end - task.start >= kTile;
    }

    static size_t scratch_bytes(const GraftlmLayer& layer) {
        const size_t group = layer.num_heads / layer.num_kv_heads, dim = layer.head_dim;
        const size_t per_head = panels_of(group, kUnit) * dim / 2 * kUnit * 4 +
                                panels_of(group, kWeighed) * (kTile * kUnit + kUnit / 2 * layer.value_dim) * 4 +
                                sizeof(TileScales);
        return layer.num_kv_heads * per_head + layer.num_heads * kTile * 4 + kTile * kUnit * 4 +
               panels_of(layer.num_heads, kUnit) * sizeof(UnitSoftmax) + kTile * dim * 2 + 2 * sizeof(TileRows);
    }

    void attend(const GraftlmTensor& q, const float* sinks, void* out) {
        begin(q);
        tile_ = &tiles_[0], next_ = &tiles_[1];
        int64_t start = task_.start, stop = end_of(start);
        tile_->find(step_, layer_, task_.request, start, stop);
        for (int64_t i = -ahead_; i < 0; ++i) fetch(i, 0, 1);
        for (; start < task_.end; start = stop, stop = end_of(start)) {
            has_next_ = stop < task_.end;
            if (has_next_) next_->find(step_, layer_, task_.request, stop, end_of(stop));
            find_whole_blocks();
            for (int64_t h = 0; h < kv_heads_; ++h) score(h);
            for (int64_t top = 0; top < layer_.num_heads; top += kUnit) weigh(top);
            for (int64_t h = 0; h < kv_heads_; ++h) mix(h);
            std::swap(tile_, next_);
        }
        end(sinks, out);
    }

private:
    static int64_t panels_of(int64_t rows, int64_t height) { return (rows + height - 1) / height; }

    int64_t mixed_size() const { return kUnit / 2 * layer_.value_dim; }  // of as many heads as a tile of weights has
    // Tiles begin at multiples of kTile, so that blocks of 16 lie in one page each where pages are large enough.
    int64_t end_of(int64_t start) const { return std::min(start / kTile * kTile + kTile, task_.end); }
    int blocks() const { return (tile_->count + kUnit - 1) / kUnit; }

    // The tile of weights that begins with a KV head's `share`-th head, in the first block.
    uint32_t* weights_of(int64_t kv_head, int64_t share) const {
        return weights_ + (kv_head * shares_ + share) * kUnits * kUnit * kUnit;
    }

    void begin(const GraftlmTensor& q) {
        alignas(64) uint32_t rows[kUnit][kUnit];
        for (int64_t h = 0, panel = 0; h < kv_heads_; ++h)
            for (int64_t first = 0; first < group_; first += kUnit, ++panel)
                for (int64_t i = 0; i < depth_; i += kUnit) {
                    __m512i words[kUnit] = {};
                    for (int64_t j = 0; j < std::min<int64_t>(kUnit, group_ - first); ++j) {
                        const auto* row = static_cast<const uint16_t*>(q.data) + task_.token * q.token_stride +
                                          (h * group_ + first + j) * q.head_stride + 2 * i;
                        pack_query(row, kPanel, layer_.scale, reinterpret_cast<uint16_t*>(rows[j]));
                        words[j] = _mm512_load_si512(rows[j]);
                    }
                    transpose(words);
                    for (int j = 0; j < kUnit; ++j)
                        _mm512_store_si512(query_ + (panel * depth_ + i + j) * kUnit, words[j]);
                }
        std::memset(weights_, 0, kv_heads_ * shares_ * kUnits * kUnit * kUnit * sizeof(*weights_));
        std::memset(mixed_, 0, kv_heads_ * shares_ * mixed_size() * sizeof(*mixed_));
        std::fill(softmax_, softmax_ + panels_of(layer_.num_heads, kUnit), UnitSoftmax());
        const int64_t slice_bytes = kUnit * layer_.head_dim * sizeof(Row);
        ahead_ = std::clamp<int64_t>(kAheadBytes / slice_bytes, 1, kv_heads_ * kUnits);
    }

    // Notes which blocks can be read where they lie.
    void find_whole_blocks() {
        for (int b = 0; b < blocks(); ++b) {
            const int64_t* offsets = tile_->offsets + b * kUnit;
            bool whole = !kHasScales<C> && tile_->count >= (b + 1) * kUnit;
            for (int j = 1; j < kUnit; ++j) whole &= offsets[j] == offsets[0] + j * kv_heads_ * layer_.head_dim;
            whole_[b] = whole;
        }
    }

    // Asks for a part of the slice that is needed `ahead_` slices after the given one: as many parts for as many tiles, so
    // that fetches overlap the arithmetic. Issued together they would fill the miss buffers and stall it. A slice is one
    // block's keys or values of one KV head; they are needed in order of keys and values, heads, and blocks.
    void fetch(int64_t slice, int64_t part, int64_t parts) const {
        slice += ahead_;
        const int64_t side = kv_heads_ * kUnits, all = values_ != keys_ ? 2 * side : side;
        if (slice >= all && !has_next_) return;
        const TileRows& tile = slice >= all ? *next_ : *tile_;
        if (slice >= all) slice -= all;
        const bool of_keys = slice < side;
        if (!of_keys) slice -= side;
        const int64_t* offsets = tile.offsets + slice % kUnits * kUnit;
        const Row* base = (of_keys ? keys_ : values_) + slice / kUnits * layer_.head_dim;
        const int64_t dim = of_keys ? layer_.head_dim : layer_.value_dim;
        for (int64_t t = part * kUnit / parts; t < (part + 1) * kUnit / parts; ++t)
            fetch_lines(base + offsets[t], dim * sizeof(Row));
    }

    // Blocks' rows of one KV head; those that do not lie one after the other are copied, with zeros past the last.
    void find_rows(const Row* base, int64_t dim, UnitRows (&rows)[kUnits]) const {
        for (int b = 0; b < blocks(); ++b) {
            const int64_t* offsets = tile_->offsets + b * kUnit;
            if constexpr (!kHasScales<C>) {
                rows[b] = {base + offsets[0], kv_heads_ * layer_.head_dim / 2};
                if (whole_[b]) continue;
            }
            uint16_t* copy = gathered_ + b * kUnit * dim;
            rows[b] = {copy, dim / 2};
            const int count = std::min(kUnit, tile_->count - b * kUnit);
            for (int j = 0; j < count; ++j, copy += dim)
                for (int64_t d = 0; d < dim; d += kPanel)
                    _mm512_store_si512(copy + d, load_halves<C>(base + offsets[j] + d, dim - d));
            std::memset(copy, 0, (kUnit - count) * dim * sizeof(*copy));
        }
    }

    void score(int64_t kv_head) {
        const int64_t dim = layer_.head_dim;
        UnitRows rows[kUnits];
        find_rows(keys_ + kv_head * dim, dim, rows);
        for (int64_t p = 0; p < panels_; ++p) {
            const int64_t first = p * kUnit, heads = std::min<int64_t>(kUnit, group_ - first);
            const uint32_t* query = query_ + (kv_head * panels_ + p) * depth_ * kUnit;
            const auto fetch_part = [&](int b, int64_t i, int64_t n) {
                if (p == 0) fetch(kv_head * kUnits + b, i, n);
            };
            if (blocks() == kUnits)
                multiply_keys<kUnits>(rows, query, depth_, products_, fetch_part);
            else
                for (int b = 0; b < blocks(); ++b)
                    multiply_keys<1>(rows + b, query, depth_, products_ + b * kUnit * kUnit,
                                     [&](int, int64_t i, int64_t n) { fetch_part(b, i, n); });
            for (int b = 0; b < blocks(); ++b)
                spread_products(products_ + b * kUnit * kUnit, heads,
                                scores_ + (kv_head * group_ + first) * kTile + b * kUnit);
        }
        finish_scores(kv_head);
    }

    // What is left to do to a KV head's products, and -infinity for what is past the last token.
    void finish_scores(int64_t kv_head) {
        const int high = round_up(tile_->count, kPanel);
        TileScales key_scales;
        if (kHasScales<C>) key_scales.read(layer_.key_scales, *tile_, kv_head);
        if (kHasScales<C>) value_scales_[kv_head].read(layer_.value_scales, *tile_, kv_head);
        float* row = scores_ + kv_head * group_ * kTile;
        for (int64_t r = 0; r < group_; ++r, row += kTile) {
            if (kHasScales<C>) key_scales.multiply(row, high);
            for (int t = 0; layer_.has_soft_cap && t < high; t += kLanes)  // which `unit_` multiplies by
                store(row + t, tanh_vec(load(row + t) * cap_scale_));
            std::fill(row + tile_->count, row + high, -kInfinity);
        }
    }

    // Turns 16 heads' scores into weights, or as many as there are from `top` on.
    void weigh(int64_t top) {
        const int rows = std::min<int64_t>(kUnit, layer_.num_heads - top), high = round_up(tile_->count, kPanel);
        alignas(64) float corrections[kUnit];
        const auto write = [&](int row, int t, __m512 even, __m512 odd) {
            const int64_t kv_head = (top + row) / group_, head = (top + row) % group_;
            uint32_t* there = weights_of(kv_head, head / kWeighed) + head % kWeighed * 2 * kUnit + t * kUnit;
            for (__m512 numbers : {even, odd}) {
                if (kHasScales<C>) numbers = _mm512_mul_ps(numbers, reinterpret_cast<__m512>(value_scales_[kv_head].at(t)));
                const __m512i halves = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(numbers)));
                _mm512_store_si512(there, halves);
                _mm512_store_si512(there + kUnit, _mm512_slli_epi32(halves, 16));
                there += kUnit * kUnit;
                t += kUnit;
            }
        };
        if (!weigh_scores<kTile>(softmax_[top / kUnit], scores_ + top * kTile, rows, 0, high, unit_, corrections, write))
            return;
        for (int r = 0; r < rows; ++r)
            if (corrections[r] != 1.0f) correct(top + r, corrections[r]);
    }

    // The rows of a head's sums in the first of their tiles; the other tiles follow.
    float* mixed_of(int64_t head) const {
        const int64_t share = head / group_ * shares_ + head % group_ / kWeighed;
        return mixed_ + share * mixed_size() + head % group_ % kWeighed * 2 * kUnit;
    }

    void correct(int64_t head, float correction) {
        float* sums = mixed_of(head);
        for (int64_t d = 0; d < layer_.value_dim; d += kPanel, sums += kUnit * kUnit) {
            store(sums, load(sums) * correction);
            store(sums + kUnit, load(sums + kUnit) * correction);
        }
    }

    void mix(int64_t kv_head) {
        const int64_t dim = layer_.value_dim;
        UnitRows rows[kUnits];
        find_rows(values_ + kv_head * layer_.head_dim, dim, rows);
        for (int64_t share = 0; share < shares_; ++share) {
            const uint32_t* weights = weights_of(kv_head, share);
            float* mixed = mixed_ + (kv_head * shares_ + share) * mixed_size();
            const auto fetch_part = [&](int b, int64_t i) {
                if (share == 0 && values_ != keys_) fetch((kv_heads_ + kv_head) * kUnits + b, i, dim / kPanel);
            };
            int64_t d = 0;
            for (; d + 4 * kPanel <= dim; d += 4 * kPanel)
                multiply_values<4>(weights, rows, blocks(), d, mixed + d / 2 * kUnit, fetch_part);
            for (; d + 2 * kPanel <= dim; d += 2 * kPanel)
                multiply_values<2>(weights, rows, blocks(), d, mixed + d / 2 * kUnit, fetch_part);
            if (d < dim) multiply_values<1>(weights, rows, blocks(), d, mixed + d / 2 * kUnit, fetch_part);
        }
    }

    void end(const float* sinks, void* out) {
        float* row = reinterpret_cast<float*>(gathered_);
        for (int64_t h = 0; h < layer_.num_heads; ++h) {
            const UnitSoftmax& state = softmax_[h / kUnit];
            float maximum = std::max(state.maximum[h % kUnit] * unit_, kFarBelow), sum = state.sum[h % kUnit];
            if (task_.has_sinks) {  // the score of a token whose value is zero
                const float sink = std::max(sinks[h] * kLog2E, kFarBelow), larger = std::max(maximum, sink);
                const float correction = std::exp2(maximum - larger);
                sum = sum * correction + std::exp2(sink - larger);
                maximum = larger;
                correct(h, correction);
            }
            unweave(mixed_of(h), row);
            if (task_.partial == nullptr) {
                write_mixed<BFloat16>(layer_, task_.token, h, row, sum, out);
                continue;
            }
            write_partial(layer_, task_.partial, h, maximum, sum, row);
        }
    }

    // Writes sums of even and odd dimensions in the dimensions' order.
    void unweave(const float* sums, float* row) const {
        const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        for (int64_t d = 0; d < layer_.value_dim; d += kPanel, sums += kUnit * kUnit) {
            const __m512 even = _mm512_load_ps(sums), odd = _mm512_load_ps(sums + kUnit);
            _mm512_store_ps(row + d, _mm512_permutex2var_ps(even, low, odd));
            _mm512_store_ps(row + d + kUnit, _mm512_permutex2var_ps(even, high, odd));
        }
    }

    const GraftlmStep& step_;
    const GraftlmLayer& layer_;
    const QueryTask& task_;
    const int64_t kv_heads_, group_, depth_, panels_, shares_;
    const Row *keys_, *values_;
    int64_t ahead_;
    float unit_, cap_scale_;
    uint32_t *query_, *weights_;
    float *mixed_, *scores_, *products_;
    UnitSoftmax* softmax_;
    TileScales* value_scales_;
    uint16_t* gathered_;
    TileRows *tiles_, *tile_, *next_;
    bool has_next_ = false;
    bool whole_[kUnits];
};
#endif

// ---- a batch -----------------------------------------------------------------------------------------------------

struct Schedule {
    std::vector<BlockTask> blocks;
    std::vector<QueryTask> queries;
    std::vector<MergeTask> merges;
    std::vector<SharedPiece> shared;
    std::vector<float*> shared_partials;  // [pieces, members] of each group
    std::vector<float> partials;
    int64_t context_tokens = 0;  // read by all one-token queries together
};

struct Span {
    int64_t request, token, start, end;
    int64_t shared_pieces;  // of the context before
    float* partials;
};

// A group of requests, and how its common context is cut.
struct Group {
    const int32_t* members;
    int64_t num_members, shared_len, num_pieces;
};

// The groups that a layer reads together: a window would have each request see another part.
std::vector<Group> groups_of(const GraftlmStep& step, const GraftlmLayer& layer, int64_t most_tokens) {
    std::vector<Group> groups;
    for (int64_t g = 0; g < step.num_groups; ++g) {
        const int32_t* members = step.members + step.group_starts[g];
        const int64_t num_members = step.group_starts[g + 1] - step.group_starts[g];
        bool sees_all = true;
        for (int64_t i = 0; i < num_members; ++i) sees_all &= step.seq_lens[members[i]] <= layer.window;
        if (!sees_all) continue;
        const int64_t num_blocks = (num_members + most_tokens - 1) / most_tokens * layer.num_kv_heads;
        const int64_t wanted = (step.num_threads * kPiecesPerThread + num_blocks - 1) / num_blocks;
        const int64_t most = std::max<int64_t>(1, step.shared_lens[g] / kPieceTokens);
        groups.push_back({members, num_members, step.shared_lens[g], std::min(wanted, most)});
    }
    return groups;
}

// The rows of a block: as many as packing is best shared by, but blocks enough for all threads.
int64_t block_rows(const GraftlmStep& step, const GraftlmLayer& layer, bool on_units) {
    if (!on_units) return kBlockRows;
    int64_t rows = 0;
    for (int64_t b = 0; b < step.num_requests; ++b)
        if (step.query_lens[b] > 1) rows += step.query_lens[b] * layer.num_heads;
    return std::clamp(rows / (step.num_threads * kPiecesPerThread), kMinUnitBlockRows, kUnitBlockRows);
}

// Adds what reads the groups' common contexts, once for all of a group: blocks like those of chunks.
void plan_shared(const GraftlmLayer& layer, const std::vector<Group>& groups, const std::vector<Span>& spans,
                 int64_t most_members, int64_t partial_floats, Schedule& schedule) {
    size_t num_pieces = 0, num_partials = 0;
    for (const Group& g : groups) num_pieces += g.num_pieces, num_partials += g.num_pieces * g.num_members;
    schedule.shared.reserve(num_pieces);  // tasks point into both
    schedule.shared_partials.reserve(num_partials);
    for (const Group& g : groups) {
        const int64_t length = round_up((g.shared_len + g.num_pieces - 1) / g.num_pieces, kTile);
        for (int64_t piece = 0; piece < g.num_pieces; ++piece) {
            float** partials = schedule.shared_partials.data() + schedule.shared_partials.size();
            for (int64_t i = 0; i < g.num_members; ++i)  // requests of one token each are the first spans
                schedule.shared_partials.push_back(spans[g.members[i]].partials + piece * partial_floats);
            const int64_t start = std::min(piece * length, g.shared_len), end = std::min(start + length, g.shared_len);
            schedule.shared.push_back({g.members, partials, start, end});
            for (int64_t first = 0; first < g.num_members; first += most_members) {
                const int64_t count = std::min(most_members, g.num_members - first);
                for (int64_t h = 0; h < layer.num_kv_heads; ++h)
                    schedule.blocks.push_back({g.members[0], h, 0, 0, count, &schedule.shared.back(), first});
            }
        }
    }
}

void plan(const GraftlmStep& step, const GraftlmLayer& layer, bool has_sinks, bool on_units, Schedule& schedule) {
    const int64_t group = layer.num_heads / layer.num_kv_heads;
    const int64_t most_tokens = std::max<int64_t>(1, block_rows(step, layer, on_units) / group);
    const int64_t most_members = std::max<int64_t>(1, (on_units ? kUnitBlockRows : kBlockRows) / group);
    const std::vector<Group> groups = groups_of(step, layer, most_members);
    std::vector<const Group*> group_of(groups.empty() ? 0 : step.num_requests);
    for (const Group& g : groups)
        for (int64_t i = 0; i < g.num_members; ++i) group_of[g.members[i]] = &g;
    std::vector<Span> spans;
    int64_t token = 0;
    for (int64_t b = 0; b < step.num_requests; ++b) {
        const int64_t num = step.query_lens[b], base = step.seq_lens[b] - num;
        if (num == 1) {
            const Group* shared = groups.empty() ? nullptr : group_of[b];
            const int64_t start = shared ? shared->shared_len : std::max<int64_t>(0, base + 1 - layer.window);
            spans.push_back({b, token, start, base + 1, shared ? shared->num_pieces : 0, nullptr});
            schedule.context_tokens += base + 1 - spans.back().start;
        }
        const int64_t num_blocks = (num + most_tokens - 1) / most_tokens;
        const int64_t block_tokens = (num + num_blocks - 1) / num_blocks;  // alike, so that none packs for a few rows
        for (int64_t i = 0; num > 1 && i < num; i += block_tokens) {
            const int64_t count = std::min(block_tokens, num - i);
            for (int64_t h = 0; h < layer.num_kv_heads; ++h)
                schedule.blocks.push_back({b, h, token + i, base + i, count, nullptr, 0});
        }
        token += num;
    }
    // Later blocks see more context: start with them, so that the last task to start is a small one.
    std::reverse(schedule.blocks.begin(), schedule.blocks.end());

    const int64_t wanted = schedule.context_tokens / (step.num_threads * kPiecesPerThread) + 1;
    const int64_t longest = std::max((wanted + kTile - 1) / kTile * kTile, kPieceTokens);
    const int64_t partial_floats = layer.num_heads * (layer.value_dim + 2);
    // Rounded up, so that fewer pieces may do: none is empty. Whole tiles, so that tiles begin where pages do.
    auto length_of = [&](const Span& s) {
        const int64_t pieces = step.num_threads == 1 ? 1 : std::max<int64_t>(1, (s.end - s.start) / longest);
        return round_up((s.end - s.start + pieces - 1) / pieces, kTile);
    };
    auto pieces_of = [&](const Span& s) { return (s.end - s.start + length_of(s) - 1) / length_of(s); };
    const auto partials_of = [&](const Span& s) {
        const int64_t pieces = s.shared_pieces + pieces_of(s);
        return pieces > 1 ? pieces : 0;
    };
    int64_t num_partials = 0;
    for (const Span& s : spans) num_partials += partials_of(s);
    schedule.partials.resize(num_partials * partial_floats);
    float* partial = schedule.partials.data();
    for (Span& s : spans) {
        const int64_t pieces = pieces_of(s), length = length_of(s), num = partials_of(s);
        s.partials = num ? partial : nullptr;
        if (num) schedule.merges.push_back({s.token, num, partial});
        float* own = num ? partial + s.shared_pieces * partial_floats : nullptr;
        for (int64_t i = 0; i < pieces; ++i) {
            const int64_t start = s.start + i * length;
            schedule.queries.push_back({s.request, s.token, start, std::min(start + length, s.end),
                                        has_sinks && i == 0, num ? own + i * partial_floats : nullptr});
        }
        partial += num * partial_floats;
    }
    plan_shared(layer, groups, spans, most_members, partial_floats, schedule);
}

size_t scratch_bytes(const GraftlmLayer& layer) {
    const size_t dim = layer.head_dim, heads = layer.num_heads, group = heads / layer.num_kv_heads;
    const size_t rows = std::max<size_t>(kBlockRows, group) + kPadding;  // a block is at least one token
    const size_t query = heads * (dim * 8 + 4) + heads * sizeof(Softmax) + 2 * sizeof(TileRows);
    const size_t block = 4 * (2 * rows * dim + 2 * dim * kTile + 2 * rows * kTile + rows) + rows * sizeof(Softmax) +
                         2 * sizeof(TileRows) + 4 * dim;
    size_t most = std::max(query, block);
#ifdef HAS_MATRIX_UNITS
    most = std::max(most, UnitBlock<BFloat16>::scratch_bytes(layer));
    most = std::max(most, UnitQuery<BFloat16>::scratch_bytes(layer));
#endif
    return most + 16 * 64;
}

template <class E, class C>
void write_token(const GraftlmLayer& layer, const GraftlmTensor& from, void* to, uint16_t* scales, int64_t token,
                 int64_t slot) {
    const int64_t dim = layer.head_dim;
    for (int64_t h = 0; h < layer.num_kv_heads; ++h) {
        const int64_t there = slot * layer.num_kv_heads + h;
        auto* row = static_cast<typename C::Element*>(to) + there * dim;
        const auto* numbers =
            static_cast<const typename E::Element*>(from.data) + token * from.token_stride + h * from.head_stride;
        if constexpr (kHasScales<C>)
            scales[there] = C::template encode<E>(numbers, dim, row);
        else
            std::memcpy(row, numbers, dim * sizeof(*row));
    }
}

template <class E, class C>
void attend_chunk(const GraftlmStep& step, const GraftlmLayer& layer, const BlockTask& task, bool on_units,
                  const GraftlmTensor& q, const float* sinks, void* out, Scratch& scratch) {
#ifdef HAS_MATRIX_UNITS
    if constexpr (std::is_same_v<E, BFloat16>)
        if (on_units) return UnitBlock<C>(step, layer, task, scratch).attend(q, task.shared ? nullptr : sinks, out);
#endif
    attend_block<E, C>(step, layer, task, q, task.shared ? nullptr : sinks, out, scratch);
}

template <class E, class C>
void attend_token(const GraftlmStep& step, const GraftlmLayer& layer, const QueryTask& task, bool on_units,
                  const GraftlmTensor& q, const float* sinks, void* out, Scratch& scratch) {
#ifdef HAS_MATRIX_UNITS
    if constexpr (std::is_same_v<E, BFloat16>)
        if (on_units && UnitQuery<C>::suits(layer, task))
            return UnitQuery<C>(step, layer, task, scratch).attend(q, sinks, out);
#endif
    attend_query<E, C>(step, layer, task, q, sinks, out, scratch);
}

template <class E, class C>
void attend(const GraftlmStep& step, const GraftlmLayer& layer, const GraftlmTensor& q, const GraftlmTensor& k,
            const GraftlmTensor& v, const float* sinks, void* out) {
    const bool on_units = std::is_same_v<E, BFloat16> && step.use_matrix_units && graftlm_has_matrix_units();
    Schedule schedule;
    plan(step, layer, sinks != nullptr, on_units, schedule);
    const bool serial = schedule.blocks.empty() && schedule.context_tokens < kSerialTokens;
    const int threads = serial ? 1 : static_cast<int>(step.num_threads);
    const int64_t num_blocks = schedule.blocks.size(), num_tasks = num_blocks + schedule.queries.size();
    const int64_t num_merges = schedule.merges.size();
#pragma omp parallel num_threads(threads)
    {
        static thread_local Scratch scratch;
        scratch.reserve(scratch_bytes(layer));
#ifdef HAS_MATRIX_UNITS
        if (on_units) shape_tiles();
#endif
#pragma omp for schedule(static)
        for (int64_t t = 0; t < step.num_tokens; ++t) {
            write_token<E, C>(layer, k, layer.keys, layer.key_scales, t, step.out_slots[t]);
            if (layer.values != layer.keys)
                write_token<E, C>(layer, v, layer.values, layer.value_scales, t, step.out_slots[t]);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_tasks; ++i) {
            if (i < num_blocks)
                attend_chunk<E, C>(step, layer, schedule.blocks[i], on_units, q, sinks, out, scratch);
            else
                attend_token<E, C>(step, layer, schedule.queries[i - num_blocks], on_units, q, sinks, out, scratch);
        }
#ifdef HAS_MATRIX_UNITS
        if (on_units) release_tiles();
#endif
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_merges; ++i) merge_pieces<E>(layer, schedule.merges[i], out);
    }
}

}  // namespace

extern "C" {

// Write k and v at the step's slots, attend, and store the mixed values in out, [T, H, D_v] contiguous. `sinks` is [H],
// or null. The first type is that of q, k, v and out; the second, where there is one, that of the cache.
void graftlm_attend_float32(const GraftlmStep* step, const GraftlmLayer* layer, const GraftlmTensor* q,
                            const GraftlmTensor* k, const GraftlmTensor* v, const float* sinks, void* out) {
    attend<Float32, Float32>(*step, *layer, *q, *k, *v, sinks, out);
}

void graftlm_attend_bfloat16(const GraftlmStep* step, const GraftlmLayer* layer, const GraftlmTensor* q,
                             const GraftlmTensor* k, const GraftlmTensor* v, const float* sinks, void* out) {
    attend<BFloat16, BFloat16>(*step, *layer, *q, *k, *v, sinks, out);
}

void graftlm_attend_float32_int8(const GraftlmStep* step, const GraftlmLayer* layer, const GraftlmTensor* q,
                                 const GraftlmTensor* k, const GraftlmTensor* v, const float* sinks, void* out) {
    attend<Float32, Int8>(*step, *layer, *q, *k, *v, sinks, out);
}

void graftlm_attend_bfloat16_int8(const GraftlmStep* step, const GraftlmLayer* layer, const GraftlmTensor* q,
                                  const GraftlmTensor* k, const GraftlmTensor* v, const float* sinks, void* out) {
    attend<BFloat16, Int8>(*step, *layer, *q, *k, *v, sinks, out);
}
}
