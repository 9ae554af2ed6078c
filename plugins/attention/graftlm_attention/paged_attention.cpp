// Paged attention on a CPU: writes a batch's keys and values into their pages, then attends over the pages in place.
//
// Two loops share one idea, the online softmax (Milakov & Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135):
//   - `attend_query` reads the context once for a single token's H heads. It is bound by memory, so a task walks whole
//     token rows (all KV heads), and long contexts are cut into pieces that `merge_pieces` joins (flash-decoding).
//   - `attend_block` serves a block of a chunk's tokens for one KV head. It is bound by arithmetic, so it packs keys and
//     values into tiles and multiplies them with one register-blocked kernel, `gemm_rows`.
// Scores, softmax and sums are float32. On machines with AVX512-BF16 both loops multiply pairs of bfloat16, which rounds the
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

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BF16_PAIRS 1
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define HAS_INT16_PAIRS 1
#endif

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
}

namespace {

// Floats in a vector register; and the columns of `gemm_rows`, in vectors, that the number of registers allows.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kVectors = 4;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kVectors = 2;
#else
constexpr int kLanes = 4;
constexpr int kVectors = 2;
#endif
constexpr int kRows = 6;   // rows of `gemm_rows`
constexpr int kPadding = 3 * kLanes;  // a multiple of kRows, too
constexpr int kTile = 64;  // context tokens handled between two updates of the running maximum
constexpr int64_t kBlockRows = 144;       // query rows (tokens x heads of a group) of one chunk task
constexpr int64_t kPieceTokens = 256;     // a context is not cut into pieces shorter than this
constexpr int64_t kPiecesPerThread = 4;   // how finely the work is cut for balance
constexpr int64_t kSerialTokens = 128;    // below this much context in total, waking threads costs more than it gains
constexpr float kFarBelow = -1e30f;       // a running maximum before its first score: finite, so differences are too
constexpr float kLog2E = 1.44269504f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef float LooseVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));
typedef uint16_t LooseHalfVec __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
typedef int8_t ByteVec __attribute__((vector_size(kLanes)));
typedef int8_t LooseByteVec __attribute__((vector_size(kLanes), aligned(1), may_alias));

inline int64_t round_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

inline Vec splat(float x) { return Vec{} + x; }
inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<LooseVec*>(p) = x; }

struct Float32 {
    using Element = float;
    static Vec load(const float* p) { return ::load(p); }
    static void store(float* p, Vec x) { ::store(p, x); }
};

struct BFloat16 {
    using Element = uint16_t;
    static Vec load(const uint16_t* p) {
        HalfVec half = *reinterpret_cast<const LooseHalfVec*>(p);
        return reinterpret_cast<Vec>(__builtin_convertvector(half, WordVec) << 16);
    }
    // Rounds to nearest, ties to even; a NaN stays a NaN.
    static HalfVec round(Vec x) {
#ifdef HAS_BF16_PAIRS
        return reinterpret_cast<HalfVec>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)));
#endif
        WordVec bits = reinterpret_cast<WordVec>(x);
        WordVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        WordVec quiet = (bits >> 16) | 0x40u;
        return __builtin_convertvector(x == x ? rounded : quiet, HalfVec);
    }
    static void store(uint16_t* p, Vec x) { *reinterpret_cast<LooseHalfVec*>(p) = round(x); }
    static float widen(uint16_t x) {
        const uint32_t bits = static_cast<uint32_t>(x) << 16;
        float number;
        std::memcpy(&number, &bits, 4);
        return number;
    }
    static const uint16_t* halves(const uint16_t* row, int64_t, uint16_t*) { return row; }
};

// Adding 1.5 * 2^23 rounds to an integer, half to even, and leaves it in the low bits.
constexpr float kRounder = 12582912.0f;
constexpr int32_t kRounderBits = 0x4b400000;

inline IntVec round_to_int(Vec x) { return reinterpret_cast<IntVec>(x + kRounder) - kRounderBits; }

inline Vec clamp(Vec x, float bound) {
    x = x > bound ? splat(bound) : x;
    return x < -bound ? splat(-bound) : x;
}

// Returns the largest magnitude of a row; NaN if there is one, for as integers magnitudes compare alike, and NaN above all.
template <class E>
inline float largest_magnitude(const typename E::Element* row, int64_t dim) {
    IntVec largest = {};
    for (int64_t d = 0; d < dim; d += kLanes) {
        IntVec magnitude = reinterpret_cast<IntVec>(E::load(row + d)) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    int32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits = std::max(bits, static_cast<int32_t>(largest[i]));
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    return magnitude;
}

// A row of codes. With its scale, which stands apart, it is scale * codes.
struct Int8 {
    using Element = int8_t;
    static Vec load(const int8_t* p) {
#if defined(__AVX512F__)  // GCC 12 makes several instructions of one
        IntVec codes = reinterpret_cast<IntVec>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
        IntVec codes =
            reinterpret_cast<IntVec>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
        IntVec codes = __builtin_convertvector(*reinterpret_cast<const LooseByteVec*>(p), IntVec);
#endif
        return __builtin_convertvector(codes, Vec);
    }
    // Writes a row's codes and returns its scale, by which the largest magnitude is 127 or nearly so.
    template <class E>
    static uint16_t encode(const typename E::Element* row, int64_t dim, int8_t* codes) {
        const uint16_t scale = BFloat16::round(splat(largest_magnitude<E>(row, dim) / 127.0f))[0];
        const Vec divisor = splat(BFloat16::widen(scale));
        for (int64_t d = 0; d < dim; d += kLanes) {
            Vec x = E::load(row + d) / divisor;
            x = x == x ? clamp(x, 127.0f) : Vec{};
            *reinterpret_cast<LooseByteVec*>(codes + d) = __builtin_convertvector(round_to_int(x), ByteVec);
        }
        return scale;
    }
    // Returns the codes as bfloat16, in `buffer`; cutting their low bits off loses nothing.
    static const uint16_t* halves(const int8_t* row, int64_t dim, uint16_t* buffer) {
        for (int64_t d = 0; d < dim; d += kLanes)
            *reinterpret_cast<LooseHalfVec*>(buffer + d) =
                __builtin_convertvector(reinterpret_cast<WordVec>(load(row + d)) >> 16, HalfVec);
        return buffer;
    }
};

template <class C>
constexpr bool kHasScales = std::is_same_v<C, Int8>;

// ---- small vector mathematics ------------------------------------------------------------------------------------

// 2^x for x <= 0 or barely above, to about 2 units in the last place; 0 below -126; NaN stays NaN.
inline Vec exp2_negative(Vec x) {
    Vec y = x < -127.0f ? splat(-127.0f) : x;
#if defined(__AVX512F__)  // GCC 12 makes several instructions of one
    Vec n = reinterpret_cast<Vec>(_mm512_roundscale_ps(reinterpret_cast<__m512>(y), _MM_FROUND_TO_NEAREST_INT));
#else
    Vec n = (y + kRounder) - kRounder;
#endif
    Vec r = y - n;
    Vec p = splat(1.540353039e-4f);  // the Taylor series of 2^r, |r| <= 1/2
    p = p * r + 1.333355815e-3f;
    p = p * r + 9.618129108e-3f;
    p = p * r + 5.550410866e-2f;
    p = p * r + 2.402265070e-1f;
    p = p * r + 6.931471806e-1f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    Vec result = reinterpret_cast<Vec>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(n)));
#else
    Vec result = p * reinterpret_cast<Vec>((round_to_int(n) + 127) << 23);
#endif
    return x < -126.0f ? Vec{} : result;
}

inline Vec tanh_vec(Vec x) {
    Vec magnitude = x < 0.0f ? -x : x;
    Vec e = exp2_negative(magnitude * (-2.0f * kLog2E));
    Vec large = (1.0f - e) / (1.0f + e);
    large = x < 0.0f ? -large : large;
    Vec s = x * x;  // near 0 the quotient cancels; the Taylor series does not
    Vec series = splat(-1382.0f / 155925.0f);
    series = series * s + 62.0f / 2835.0f;
    series = series * s - 17.0f / 315.0f;
    series = series * s + 2.0f / 15.0f;
    series = series * s - 1.0f / 3.0f;
    series = series * s * x + x;
    return magnitude < 0.4f ? series : large;
}

inline IntVec lane_numbers() {
    IntVec lanes = {};
    for (int i = 0; i < kLanes; ++i) lanes[i] = i;
    return lanes;
}

// The lanes of two vectors combined with their neighbours: a's in the lower half, b's in the upper.
template <class V, class Combine>
inline V combine_neighbours(V a, V b, Combine combine) {
    const IntVec even = lane_numbers() * 2;
    return combine(__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, even + 1));
}

// Combines each lane with the one `kStep` lanes away, then half as far, and so on: in groups of 2 * kStep lanes, all become
// the group's total. Templates, not loops, so that lane numbers are constants.
template <int kStep, class V, class Combine>
inline V fold_groups(V x, Combine combine) {
    if constexpr (kStep == 0) {
        return x;
    } else {
        return fold_groups<kStep / 2>(combine(x, __builtin_shuffle(x, lane_numbers() ^ kStep)), combine);
    }
}

// Combines the lanes of each of R vectors; the lanes from i * kLanes / R on hold the total of x[i].
template <class V, int R, class Combine>
inline V fold_each(const V (&x)[R], Combine combine) {
    if constexpr (R == 1) {
        return x[0];
    } else {
        V halves[R / 2];
        for (int i = 0; i < R / 2; ++i) halves[i] = combine_neighbours(x[2 * i], x[2 * i + 1], combine);
        return fold_each(halves, combine);
    }
}

template <class V, int R>
inline V sum_each(const V (&x)[R]) {
    const auto add = [](V a, V b) { return a + b; };
    return fold_groups<kLanes / R / 2>(fold_each(x, add), add);
}

template <int R>
inline Vec max_each(const Vec (&x)[R]) {
    const auto larger = [](Vec a, Vec b) { return a > b ? a : b; };
    return fold_groups<kLanes / R / 2>(fold_each(x, larger), larger);
}

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

// Where kTile context tokens of a request stand in the cache; entries past the last token repeat it.
struct TileRows {
    int64_t offsets[kTile];  // elements from the start of the layer's keys or values to the token's row
    int64_t scales[kTile];   // likewise from the start of their scales
    int count;

    void find(const GraftlmStep& step, const GraftlmLayer& layer, int64_t request, int64_t start, int64_t end) {
        const int32_t* pages = step.page_table + request * step.table_columns;
        count = static_cast<int>(std::min<int64_t>(kTile, end - start));
        int64_t page = start / step.page_size, within = start % step.page_size;
        for (int i = 0; i < count; ++i) {
            scales[i] = (pages[page] * step.page_size + within) * layer.num_kv_heads;
            offsets[i] = scales[i] * layer.head_dim;
            if (++within == step.page_size) {
                within = 0;
                ++page;
            }
        }
        for (int i = count; i < kTile; ++i) {
            offsets[i] = offsets[count - 1];
            scales[i] = scales[count - 1];
        }
    }
};

// The scales of a tile's keys or values for one KV head; zeros past the last token.
struct TileScales {
    alignas(64) float numbers[kTile];

    void read(const uint16_t* scales, const TileRows& rows, int64_t kv_head) {
        for (int t = 0; t < rows.count; ++t) numbers[t] = BFloat16::widen(scales[rows.scales[t] + kv_head]);
        for (int t = rows.count; t < kTile; ++t) numbers[t] = 0.0f;
    }
    Vec at(int t) const { return load(numbers + t); }
    void multiply(float* row, int count) const {
        for (int t = 0; t < count; t += kLanes) store(row + t, load(row + t) * load(numbers + t));
    }
};

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
// As `mix_rows`, for 2 * V vectors of D_v in bfloat16: weights likewise, and two tokens in one multiplication.
template <int R, int V>
void mix_halves(const uint16_t* weights, const float* corrections, const uint16_t* values, const TileRows& rows,
                const Ahead<BFloat16>* ahead, int64_t dim, float* mixed) {
    alignas(64) uint16_t low_words[2 * kLanes], high_words[2 * kLanes];  // which halves of two tokens become neighbours
    for (int i = 0; i < kLanes; ++i) {
        low_words[2 * i] = i;
        low_words[2 * i + 1] = 2 * kLanes + i;
        high_words[2 * i] = kLanes + i;
        high_words[2 * i + 1] = 3 * kLanes + i;
    }
    const __m512i low = _mm512_load_si512(low_words), high = _mm512_load_si512(high_words);
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
            value[2 * v] = reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(a, low, b));
            value[2 * v + 1] = reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(a, high, b));
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
                float* partial = task.partial + h * (value_dim + 2);
                partial[0] = softmax[first].maximum[r * kLanes / rows];
                partial[1] = sum;
                std::memcpy(partial + 2, mixed + h * value_dim, value_dim * sizeof(float));
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

// Tokens [first, first + count) of a request's chunk, for one KV head.
struct BlockTask {
    int64_t request;
    int64_t kv_head;
    int64_t token;     // index in the batch of the block's first token
    int64_t position;  // and its position in the context
    int64_t count;
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
        const int64_t token = task.token + r / group, head = task.kv_head * group + r % group;
        if (sinks != nullptr) softmax[r / kLanes].begin_with_sink<kLanes>(r % kLanes, sinks[head]);
        Pack::query(static_cast<const Element*>(q.data) + token * q.token_stride + head * q.head_stride, dim,
                    query + r * depth);
    }
    float scales[kLanes];
    std::fill(scales, scales + kLanes, layer.scale);

    const auto* key_base = static_cast<const Row*>(layer.keys) + task.kv_head * dim;
    const auto* value_base = static_cast<const Row*>(layer.values) + task.kv_head * dim;
    const int64_t last = task.position + task.count;
    const int64_t first = task.position < layer.window ? 0 : task.position - layer.window + 1;
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
            const int64_t position = task.position + r / group;
            const int64_t oldest = position < layer.window ? 0 : position - layer.window + 1;
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
    for (int64_t r = 0; r < count; ++r)
        write_mixed<E>(layer, task.token + r / group, task.kv_head * group + r % group, mixed + r * value_dim,
                       softmax[r / kLanes].sum[r % kLanes], out);
}

// ---- a batch -----------------------------------------------------------------------------------------------------

struct Schedule {
    std::vector<BlockTask> blocks;
    std::vector<QueryTask> queries;
    std::vector<MergeTask> merges;
    std::vector<float> partials;
    int64_t context_tokens = 0;  // read by all one-token queries together
};

struct Span {
    int64_t request, token, start, end;
};

void plan(const GraftlmStep& step, const GraftlmLayer& layer, bool has_sinks, Schedule& schedule) {
    const int64_t group = layer.num_heads / layer.num_kv_heads;
    const int64_t block_tokens = std::max<int64_t>(1, kBlockRows / group);
    std::vector<Span> spans;
    int64_t token = 0;
    for (int64_t b = 0; b < step.num_requests; ++b) {
        const int64_t num = step.query_lens[b], base = step.seq_lens[b] - num;
        if (num == 1) {
            spans.push_back({b, token, std::max<int64_t>(0, base + 1 - layer.window), base + 1});
            schedule.context_tokens += base + 1 - spans.back().start;
        }
        for (int64_t i = 0; num > 1 && i < num; i += block_tokens) {
            const int64_t count = std::min(block_tokens, num - i);
            for (int64_t h = 0; h < layer.num_kv_heads; ++h)
                schedule.blocks.push_back({b, h, token + i, base + i, count});
        }
        token += num;
    }
    // Later blocks see more context: start with them, so that the last task to start is a small one.
    std::reverse(schedule.blocks.begin(), schedule.blocks.end());

    const int64_t wanted = schedule.context_tokens / (step.num_threads * kPiecesPerThread) + 1;
    const int64_t longest = std::max((wanted + kTile - 1) / kTile * kTile, kPieceTokens);
    const int64_t partial_floats = layer.num_heads * (layer.value_dim + 2);
    // Rounded up, so that fewer pieces may do: none is empty.
    auto length_of = [&](const Span& s) {
        const int64_t pieces = step.num_threads == 1 ? 1 : std::max<int64_t>(1, (s.end - s.start) / longest);
        return (s.end - s.start + pieces - 1) / pieces;
    };
    auto pieces_of = [&](const Span& s) { return (s.end - s.start + length_of(s) - 1) / length_of(s); };
    int64_t num_partials = 0;
    for (const Span& s : spans) num_partials += pieces_of(s) > 1 ? pieces_of(s) : 0;
    schedule.partials.resize(num_partials * partial_floats);
    float* partial = schedule.partials.data();
    for (const Span& s : spans) {
        const int64_t pieces = pieces_of(s), length = length_of(s);
        if (pieces > 1) schedule.merges.push_back({s.token, pieces, partial});
        for (int64_t i = 0; i < pieces; ++i) {
            const int64_t start = s.start + i * length;
            schedule.queries.push_back({s.request, s.token, start, std::min(start + length, s.end),
                                        has_sinks && i == 0, pieces > 1 ? partial : nullptr});
            if (pieces > 1) partial += partial_floats;
        }
    }
}

size_t scratch_bytes(const GraftlmLayer& layer) {
    const size_t dim = layer.head_dim, heads = layer.num_heads, group = heads / layer.num_kv_heads;
    const size_t rows = std::max<size_t>(kBlockRows, group) + kPadding;  // a block is at least one token
    const size_t query = heads * (dim * 8 + 4) + heads * sizeof(Softmax) + 2 * sizeof(TileRows);
    const size_t block = 4 * (2 * rows * dim + 2 * dim * kTile + 2 * rows * kTile + rows) + rows * sizeof(Softmax) +
                         2 * sizeof(TileRows) + 4 * dim;
    return std::max(query, block) + 16 * 64;
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
void attend(const GraftlmStep& step, const GraftlmLayer& layer, const GraftlmTensor& q, const GraftlmTensor& k,
            const GraftlmTensor& v, const float* sinks, void* out) {
    Schedule schedule;
    plan(step, layer, sinks != nullptr, schedule);
    const bool serial = schedule.blocks.empty() && schedule.context_tokens < kSerialTokens;
    const int threads = serial ? 1 : static_cast<int>(step.num_threads);
    const int64_t num_blocks = schedule.blocks.size(), num_tasks = num_blocks + schedule.queries.size();
    const int64_t num_merges = schedule.merges.size();
#pragma omp parallel num_threads(threads)
    {
        static thread_local Scratch scratch;
        scratch.reserve(scratch_bytes(layer));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < step.num_tokens; ++t) {
            write_token<E, C>(layer, k, layer.keys, layer.key_scales, t, step.out_slots[t]);
            if (layer.values != layer.keys)
                write_token<E, C>(layer, v, layer.values, layer.value_scales, t, step.out_slots[t]);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_tasks; ++i) {
            if (i < num_blocks)
                attend_block<E, C>(step, layer, schedule.blocks[i], q, sinks, out, scratch);
            else
                attend_query<E, C>(step, layer, schedule.queries[i - num_blocks], q, sinks, out, scratch);
        }
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
