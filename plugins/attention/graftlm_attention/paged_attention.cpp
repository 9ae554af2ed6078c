// Paged attention on a CPU: writes a batch's keys and values into their pages, then attends over the pages in place.
//
// Two loops share the online softmax (Milakov & Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135):
//
//   - `attend_query` (token_attention.h) reads the context once for all H heads of a single token. Memory limits its
//     speed, so a task reads whole token rows (all KV heads), and long contexts are split into pieces, whose results
//     `merge_pieces` merges (flash-decoding). On AMX, `UnitQuery` (unit_query.h) does the same, and loads tiles
//     directly from the pages.
//   - `attend_block` (block_attention.h) computes a block of a chunk's tokens for one KV head. Arithmetic limits its
//     speed, so it packs keys and values into tiles and multiplies them with one register-blocked kernel, `gemm_rows`.
//     On AMX, `UnitBlock` (unit_block.h) does the same.
//
// Scores, softmax and sums are float32. With AVX512-BF16, all loops multiply pairs of bfloat16, which rounds the
// softmax weights to bfloat16; otherwise bfloat16 is widened first.
//
// The codes of an int8 cache are multiplied directly; all dtypes used here represent them exactly. A token's key scale
// multiplies its score, and its value scale multiplies its weight: one multiplication instead of D.
//
// Instruction sets: none is required. AVX2 and AVX-512 make vectors wider. AVX512-BF16, AVX512-VNNI and AMX replace
// loops at compile time, as described above; AMX also needs the operating system's permission. Without a compiled
// library the caller computes attention with torch's operations.
//
// The interface is plain C, for ctypes.

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "block_attention.h"
#include "graftlm/matrix_units.h"
#include "paged_step.h"
#include "token_attention.h"
#include "unit_block.h"
#include "unit_query.h"

extern "C" {

// Returns whether bfloat16 queries are computed on AMX, if a step permits it.
int32_t graftlm_has_matrix_units() {
    static const bool has = may_use_matrix_units();
    return has;
}
}

namespace {

constexpr int64_t kBlockRows = 144;        // query rows (tokens x heads of a group) of one chunk task
constexpr int64_t kMinUnitBlockRows = 96;  // minimum on AMX, used if many threads share the work
constexpr int64_t kPieceTokens = 256;      // minimum length of a piece of context
constexpr int64_t kPiecesPerThread = 4;    // tasks per thread, for balance
constexpr int64_t kSerialTokens = 128;     // with less context in total, one thread is faster than several

struct Schedule {
    std::vector<BlockTask> blocks;
    std::vector<QueryTask> queries;
    std::vector<MergeTask> merges;
    std::vector<SharedPiece> shared;
    std::vector<float*> shared_partials;  // [pieces, members] for each group
    std::vector<float> partials;
    int64_t context_tokens = 0;  // sum over all one-token queries
};

// The context [start, end) that one request of one token attends to by itself, without a shared prefix.
struct Span {
    int64_t request, token, start, end;
    int64_t shared_pieces;  // pieces of the shared context before `start`
    float* partials;
};

// A group of requests, and the number of pieces of its shared context.
struct Group {
    const int32_t* members;
    int64_t num_members, shared_len, num_pieces;
};

// Returns the groups whose shared context is read once in this layer. A group is left out if a request's context is
// longer than the window, because requests then attend to different parts of the shared context.
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

// Returns the number of rows per block. Large blocks are better, because keys and values are packed once per block; but
// there must be enough blocks for all threads.
int64_t block_rows(const GraftlmStep& step, const GraftlmLayer& layer, bool on_units) {
    if (!on_units) return kBlockRows;
    int64_t rows = 0;
    for (int64_t b = 0; b < step.num_requests; ++b)
        if (step.query_lens[b] > 1) rows += step.query_lens[b] * layer.num_heads;
    return std::clamp(rows / (step.num_threads * kPiecesPerThread), kMinUnitBlockRows, kUnitBlockRows);
}

// Adds the tasks that read each group's shared context once for all its requests. The tasks are blocks, as for chunks.
void plan_shared(const GraftlmLayer& layer, const std::vector<Group>& groups, const std::vector<Span>& spans,
                 int64_t most_members, int64_t partial_floats, Schedule& schedule) {
    size_t num_pieces = 0, num_partials = 0;
    for (const Group& g : groups) num_pieces += g.num_pieces, num_partials += g.num_pieces * g.num_members;
    schedule.shared.reserve(num_pieces);  // tasks point into both vectors
    schedule.shared_partials.reserve(num_partials);
    for (const Group& g : groups) {
        const int64_t length = round_up((g.shared_len + g.num_pieces - 1) / g.num_pieces, kTile);
        for (int64_t piece = 0; piece < g.num_pieces; ++piece) {
            float** partials = schedule.shared_partials.data() + schedule.shared_partials.size();
            for (int64_t i = 0; i < g.num_members; ++i)  // the first spans are the one-token requests, in batch order
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
        const int64_t block_tokens =
            (num + num_blocks - 1) / num_blocks;  // equal sizes, so that no block packs keys for only a few rows
        for (int64_t i = 0; num > 1 && i < num; i += block_tokens) {
            const int64_t count = std::min(block_tokens, num - i);
            for (int64_t h = 0; h < layer.num_kv_heads; ++h)
                schedule.blocks.push_back({b, h, token + i, base + i, count, nullptr, 0});
        }
        token += num;
    }
    // Later blocks have more context. Start with them, so that the last task is small.
    std::reverse(schedule.blocks.begin(), schedule.blocks.end());

    const int64_t wanted = schedule.context_tokens / (step.num_threads * kPiecesPerThread) + 1;
    const int64_t longest = std::max((wanted + kTile - 1) / kTile * kTile, kPieceTokens);
    const int64_t partial_floats = layer.num_heads * (layer.value_dim + 2);
    // Pieces are rounded up to whole tiles, so that tiles start at page boundaries. This may reduce the number of
    // pieces; no piece is empty.
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
            schedule.queries.push_back({s.request, s.token, start, std::min(start + length, s.end), has_sinks && i == 0,
                                        num ? own + i * partial_floats : nullptr});
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

// Write k and v at the step's slots, attend, and write the result to out, [T, H, D_v] contiguous. `sinks` is [H] or
// null. The first dtype in the name is the dtype of q, k, v and out. The second is the dtype of the cache, if it
// differs.
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
