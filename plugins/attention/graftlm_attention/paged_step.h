// What a call of the paged attention is given, in plain C.

#pragma once

#include <cstdint>

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
    void* keys;              // [slots, H_kv, D]
    void* values;            // [slots, H_kv, D]
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
