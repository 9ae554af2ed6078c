// The arguments of paged attention, in plain C.

#pragma once

#include <cstdint>

extern "C" {

// One step's batch: B requests, T tokens, P page-table columns. The pointers are to host memory, which is only read.
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
    int32_t use_matrix_units;   // whether bfloat16 queries may use AMX; tests set it to 0
    // G groups of one-token requests, which are the first requests of the batch. All requests of a group start with the
    // same pages; no request is in two groups.
    int64_t num_groups;
    const int32_t* group_starts;  // [G + 1], index in `members` of each group's first request
    const int32_t* members;       // indices of requests
    const int32_t* shared_lens;   // [G], tokens that a group shares; fewer than the context of any of its requests
};

// One layer's shape and pages. `window` is at least 1; `soft_cap` is read only if `has_soft_cap` is set. If `values`
// equals `keys`, a value is the first D_v numbers of its key; otherwise D_v is D.
struct GraftlmLayer {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;   // a multiple of 16
    int64_t value_dim;  // a multiple of 16, at most `head_dim`
    int64_t window;
    int32_t has_soft_cap;
    float soft_cap;
    float scale;
    void* keys;              // [slots, H_kv, D]
    void* values;            // [slots, H_kv, D]
    uint16_t* key_scales;    // [slots, H_kv] bfloat16 if keys and values are int8 codes; else null
    uint16_t* value_scales;  // the same for values; equals `key_scales` if `values` equals `keys`
};

// A [T, heads, D] tensor whose last dimension is contiguous; strides in elements.
struct GraftlmTensor {
    void* data;
    int64_t token_stride;
    int64_t head_stride;
};
}
