// Exchanges small tensors between the processes of one machine through shared memory.
//
// Each rank has a line with the number of its latest operation, and two buffers that operations use in turn.
//
//     rank 0 | number, pid |  buffer 0  |  buffer 1  |
//     rank 1 | number, pid |  buffer 0  |  buffer 1  |
//
// In operation s, a rank writes its own buffer s % 2, publishes s, waits until the other ranks have published s, and
// reads their buffers. It writes buffer s % 2 only after all ranks have published s - 1: they have then read what
// operation s - 2 wrote there.
//
// A wait ends at a deadline, and when the process of a rank has ended. After a failure, every call fails.
//
// Instruction sets: none; plain loops, which GCC vectorises for the CPU that it compiles for. Without a compiled
// library the caller uses gloo.
//
// The interface is plain C, for ctypes.

#include <sched.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kSpins = 4000;             // about 20 us
constexpr int64_t kYieldNs = 200'000;        // then the core is yielded
constexpr int64_t kSleepNs = 50'000;         // then the thread sleeps between looks
constexpr int64_t kLivenessNs = 20'000'000;  // time between two looks at the other processes

enum Status : int64_t { kDone = 0, kTimeout = 1, kEnded = 2 };

struct alignas(kLine) Line {
    std::atomic<uint64_t> number;
    std::atomic<int64_t> pid;
};

struct Group {
    char* memory;
    int64_t rank, size, capacity;
    int64_t timeout_ns;
    uint64_t number;  // of this rank's latest operation
    int64_t status;
    int64_t culprit;  // the rank that did not answer

    Line& line(int64_t r) const { return reinterpret_cast<Line*>(memory)[r]; }
    char* buffer(int64_t r, uint64_t n) const {
        return memory + size * kLine + (2 * r + static_cast<int64_t>(n % 2)) * capacity;
    }
};

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

// Whether a process has ended; a zombie has.
bool has_ended(int64_t pid) {
    char path[64], text[512];
    std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(pid));
    std::FILE* file = std::fopen(path, "r");
    if (file == nullptr) return true;
    const size_t length = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    text[length] = 0;
    const char* after = std::strrchr(text, ')');  // the name may contain spaces and brackets
    return after == nullptr || after[1] == 0 || after[2] == 'Z' || after[2] == 'X';
}

inline void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Waits until a rank has published an operation.
int64_t await(Group* group, int64_t rank, uint64_t number) {
    const Line& line = group->line(rank);
    for (int64_t i = 0; i < kSpins; ++i) {
        if (line.number.load(std::memory_order_acquire) >= number) return kDone;
        pause_core();
    }
    const int64_t start = now_ns();
    int64_t looked = start;
    while (line.number.load(std::memory_order_acquire) < number) {
        const int64_t now = now_ns();
        if (now - start < kYieldNs) {
            sched_yield();
            continue;
        }
        const timespec pause = {0, kSleepNs};
        nanosleep(&pause, nullptr);
        const int64_t pid = line.pid.load(std::memory_order_relaxed);
        const bool ended = now - looked > kLivenessNs && pid != 0 && (looked = now, has_ended(pid));
        // The rank may have published the operation directly before its end.
        if ((ended || now - start > group->timeout_ns) && line.number.load(std::memory_order_acquire) < number) {
            group->culprit = rank;
            return group->status = ended ? kEnded : kTimeout;
        }
    }
    return kDone;
}

int64_t await_all(Group* group, uint64_t number) {
    for (int64_t r = 0; r < group->size; ++r)
        if (r != group->rank)
            if (const int64_t status = await(group, r, number)) return status;
    return kDone;
}

// Begins an operation: writes this rank's part and publishes it.
int64_t publish(Group* group, const void* data, int64_t num_bytes) {
    if (group->status) return group->status;
    const uint64_t number = group->number + 1;
    if (const int64_t status = await_all(group, number - 1)) return status;
    if (data != nullptr) std::memcpy(group->buffer(group->rank, number), data, num_bytes);
    group->number = number;
    group->line(group->rank).number.store(number, std::memory_order_release);
    return kDone;
}

inline float widened(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

inline uint16_t rounded(float x) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t up = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return static_cast<uint16_t>(x != x ? 0x7fc0u : up);
}

inline float read(const float* from, int64_t i) { return from[i]; }
inline float read(const uint16_t* from, int64_t i) { return widened(from[i]); }
inline void write(float* to, int64_t i, float x) { to[i] = x; }
inline void write(uint16_t* to, int64_t i, float x) { to[i] = rounded(x); }

// Adds up the ranks' parts in the order of the ranks, so that all ranks and all runs get the same bits.
template <typename T>
int64_t reduce(Group* group, T* data, int64_t num_elements) {
    constexpr int64_t kBlock = 256;
    const int64_t most = group->capacity / static_cast<int64_t>(sizeof(T));
    for (int64_t start = 0; start < num_elements; start += most) {
        const int64_t count = std::min(most, num_elements - start);
        T* out = data + start;
        if (const int64_t status = publish(group, out, count * sizeof(T))) return status;
        if (const int64_t status = await_all(group, group->number)) return status;
        for (int64_t at = 0; at < count; at += kBlock) {
            const int64_t length = std::min(kBlock, count - at);
            float sum[kBlock];
            for (int64_t r = 0; r < group->size; ++r) {
                const T* part = reinterpret_cast<const T*>(group->buffer(r, group->number)) + at;
                if (r == 0)
                    for (int64_t i = 0; i < length; ++i) sum[i] = read(part, i);
                else
                    for (int64_t i = 0; i < length; ++i) sum[i] += read(part, i);
            }
            for (int64_t i = 0; i < length; ++i) write(out + at, i, sum[i]);
        }
    }
    return kDone;
}

}  // namespace

extern "C" {

int64_t graftlm_shared_bytes(int64_t size, int64_t capacity) { return size * (kLine + 2 * capacity); }

// memory: zeroed, of graftlm_shared_bytes; capacity: bytes of a buffer, a multiple of 64.
void* graftlm_shared_join(void* memory, int64_t rank, int64_t size, int64_t capacity, int64_t timeout_ns) {
    Group* group = new Group{static_cast<char*>(memory), rank, size, capacity, timeout_ns, 0, kDone, -1};
    group->line(rank).pid.store(getpid(), std::memory_order_relaxed);
    return group;
}

void graftlm_shared_leave(void* joined) {
    Group* group = static_cast<Group*>(joined);
    group->line(group->rank).pid.store(-1, std::memory_order_relaxed);  // no process has this id
    delete group;
}

void graftlm_shared_set_timeout(void* group, int64_t timeout_ns) {
    static_cast<Group*>(group)->timeout_ns = timeout_ns;
}

int64_t graftlm_shared_culprit(void* group) { return static_cast<Group*>(group)->culprit; }

int64_t graftlm_shared_sum_float32(void* group, float* data, int64_t num_elements) {
    return reduce(static_cast<Group*>(group), data, num_elements);
}

int64_t graftlm_shared_sum_bfloat16(void* group, uint16_t* data, int64_t num_elements) {
    return reduce(static_cast<Group*>(group), data, num_elements);
}

// data [num_bytes]; out [size, num_bytes].
int64_t graftlm_shared_gather(void* joined, const char* data, char* out, int64_t num_bytes) {
    Group* group = static_cast<Group*>(joined);
    for (int64_t start = 0; start < num_bytes; start += group->capacity) {
        const int64_t count = std::min(group->capacity, num_bytes - start);
        if (const int64_t status = publish(group, data + start, count)) return status;
        if (const int64_t status = await_all(group, group->number)) return status;
        for (int64_t r = 0; r < group->size; ++r)
            std::memcpy(out + r * num_bytes + start, group->buffer(r, group->number), count);
    }
    return kDone;
}

// data [num_bytes], written on all ranks but the source.
int64_t graftlm_shared_broadcast(void* joined, char* data, int64_t num_bytes, int64_t source) {
    Group* group = static_cast<Group*>(joined);
    for (int64_t start = 0; start < num_bytes; start += group->capacity) {
        const int64_t count = std::min(group->capacity, num_bytes - start);
        const bool is_source = group->rank == source;
        if (const int64_t status = publish(group, is_source ? data + start : nullptr, count)) return status;
        if (is_source) continue;
        if (const int64_t status = await(group, source, group->number)) return status;
        std::memcpy(data + start, group->buffer(source, group->number), count);
    }
    return kDone;
}

}  // extern "C"
