// Runs one CUDA kernel on the CPU: blocks one after another, the threads of a block as fibers that give way only at
// barriers and warp operations. Enough for values, indexing, barriers and shuffles; memory order within a warp and time are
// not emulated. Odd blocks start their threads from the last, so that a missing barrier shows as a wrong value.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define ANYMAMBA_EMULATED 1
#define __CUDA_ARCH__ 900
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __shared__ static
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct uint3 {
    unsigned x, y, z;
};
typedef uint3 dim3;
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulation {

enum State { running, at_block_barrier, at_warp_barrier, finished };

struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    uint3 index;
    int linear;
    State state;
    unsigned waiting_mask;
    unsigned warp_operations;
    long long barriers;
};

struct Warp {
    unsigned long long values[2][32];
    float floats[2][32][16];
    unsigned arrived;
};

static std::vector<Thread> threads;
static std::vector<Warp> warps;
static Thread* current;
static ucontext_t scheduler;
static uint3 block_index, block_size, grid_size;
static const std::function<void()>* body;
static std::vector<char> dynamic_shared;
static int block_or_value;

static void give_way(State state) {
    current->state = state;
    swapcontext(&current->context, &scheduler);
}

static void start() {
    (*body)();
    current->state = finished;
    swapcontext(&current->context, &scheduler);
}

static void block_barrier() { give_way(at_block_barrier); }

// Every lane of the mask leaves a value; then each may read any lane's. Two buffers: see the proof in `exchange`.
static const unsigned long long* exchange(unsigned mask, unsigned long long value) {
    // A lane can be at most one operation ahead of another of the same mask (it cannot pass the next barrier alone),
    // so the buffer of this operation is not overwritten before all have read it.
    Warp& warp = warps[current->linear / 32];
    unsigned long long* buffer = warp.values[current->warp_operations++ & 1];
    buffer[current->linear % 32] = value;
    current->waiting_mask = mask;
    give_way(at_warp_barrier);
    return buffer;
}

// The same for 16 floats of every lane: the operands of a matrix product of the whole warp.
static const float (*exchange_floats(const float (&own)[16]))[16] {
    Warp& warp = warps[current->linear / 32];
    float(*buffer)[16] = warp.floats[current->warp_operations & 1];
    memcpy(buffer[current->linear % 32], own, sizeof own);
    exchange(0xffffffffu, 0);
    return buffer;
}

static bool release_warps() {
    bool any = false;
    for (size_t w = 0; w < warps.size(); ++w) {
        unsigned waiting = 0, alive = 0;
        for (int lane = 0; lane < 32 && w * 32 + lane < threads.size(); ++lane) {
            Thread& thread = threads[w * 32 + lane];
            if (thread.state != finished) alive |= 1u << lane;
            if (thread.state == at_warp_barrier) waiting |= 1u << lane;
        }
        for (int lane = 0; lane < 32 && w * 32 + lane < threads.size(); ++lane) {
            Thread& thread = threads[w * 32 + lane];
            if (thread.state != at_warp_barrier) continue;
            unsigned wanted = thread.waiting_mask & alive;
            if ((waiting & wanted) == wanted) {
                bool same = true;  // all of them must name the same mask
                for (int other = 0; other < 32; ++other)
                    if (wanted >> other & 1) same &= threads[w * 32 + other].waiting_mask == thread.waiting_mask;
                if (!same) continue;
                for (int other = 0; other < 32; ++other)
                    if (wanted >> other & 1) threads[w * 32 + other].state = running;
                any = true;
            }
        }
    }
    return any;
}

// Returns 0, or 700 if the block can never go on (a barrier that not all threads reach).
static int run(dim3 grid, dim3 block, unsigned shared_bytes, const std::function<void()>& kernel) {
    const int count = (int)(block.x * block.y * block.z);
    if (count == 0 || grid.x * grid.y * grid.z == 0) return 1;
    if (count > 1024 || grid.y > 65535 || grid.z > 65535) return 1;
    body = &kernel;
    block_size = block;
    grid_size = grid;
    if ((int)threads.size() != count) {
        threads.clear();
        threads.resize(count);
        for (Thread& thread : threads) thread.stack.resize(64 * 1024);
    }
    warps.resize((count + 31) / 32);
    dynamic_shared.resize(shared_bytes + 128);
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                block_index = {x, y, z};
                memset(dynamic_shared.data(), 0xff, dynamic_shared.size());  // NaN: shared memory starts undefined
                for (int i = 0; i < count; ++i) {
                    Thread& thread = threads[i];
                    thread.index = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
                    thread.linear = i;
                    thread.state = running;
                    thread.warp_operations = 0;
                    getcontext(&thread.context);
                    thread.context.uc_stack.ss_sp = thread.stack.data();
                    thread.context.uc_stack.ss_size = thread.stack.size();
                    thread.context.uc_link = 0;
                    makecontext(&thread.context, start, 0);
                }
                const bool backwards = (x + y + z) % 2;
                for (;;) {
                    int done = 0, waiting = 0;
                    for (int k = 0; k < count; ++k) {
                        Thread& thread = threads[backwards ? count - 1 - k : k];
                        if (thread.state == running) {
                            current = &thread;
                            swapcontext(&scheduler, &thread.context);
                        }
                        done += thread.state == finished;
                        waiting += thread.state == at_block_barrier;
                    }
                    if (done == count) break;
                    if (release_warps()) continue;
                    bool any = false;
                    for (Thread& thread : threads) any |= thread.state == running;
                    if (any) continue;
                    if (done + waiting != count) return 700;
                    for (Thread& thread : threads)
                        if (thread.state == at_block_barrier) thread.state = running;
                }
            }
    return 0;
}

static unsigned char* shared_memory() {
    uintptr_t start = (uintptr_t)dynamic_shared.data();
    return (unsigned char*)((start + 127) / 128 * 128);
}

template <class Value>
static unsigned long long as_bits(Value value) {
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class Value>
static Value from_bits(unsigned long long bits) {
    Value value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace emulation

#define threadIdx (emulation::current->index)
#define blockIdx (emulation::block_index)
#define blockDim (emulation::block_size)
#define gridDim (emulation::grid_size)

static inline void __syncthreads() { emulation::block_barrier(); }
static inline void __syncwarp(unsigned mask = 0xffffffffu) { emulation::exchange(mask, 0); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}

template <class Value>
static Value __shfl_sync(unsigned mask, Value value, int source, int width = 32) {
    int lane = emulation::current->linear % 32;
    auto bits = emulation::exchange(mask, emulation::as_bits(value));
    return emulation::from_bits<Value>(bits[(lane & ~(width - 1)) + (source & (width - 1))]);
}
template <class Value>
static Value __shfl_xor_sync(unsigned mask, Value value, int other, int width = 32) {
    int lane = emulation::current->linear % 32, source = lane ^ other;
    auto bits = emulation::exchange(mask, emulation::as_bits(value));
    return emulation::from_bits<Value>(bits[source / width == lane / width || source < lane ? source : lane]);
}
template <class Value>
static Value __shfl_up_sync(unsigned mask, Value value, unsigned by, int width = 32) {
    int lane = emulation::current->linear % 32;
    auto bits = emulation::exchange(mask, emulation::as_bits(value));
    return emulation::from_bits<Value>(bits[lane % width >= (int)by ? lane - by : lane]);
}
template <class Value>
static Value __shfl_down_sync(unsigned mask, Value value, unsigned by, int width = 32) {
    int lane = emulation::current->linear % 32;
    auto bits = emulation::exchange(mask, emulation::as_bits(value));
    return emulation::from_bits<Value>(bits[lane % width + (int)by < width ? lane + by : lane]);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    auto bits = emulation::exchange(mask, predicate != 0);
    unsigned result = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1 && (size_t)(emulation::current->linear / 32 * 32 + lane) < emulation::threads.size())
            result |= (unsigned)(bits[lane] & 1) << lane;
    return result;
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

static inline unsigned __float_as_uint(float x) { return (unsigned)emulation::as_bits(x); }
static inline int __float_as_int(float x) { return (int)emulation::as_bits(x); }
static inline float __uint_as_float(unsigned x) { return emulation::from_bits<float>(x); }
static inline float __int_as_float(int x) { return emulation::from_bits<float>((unsigned)x); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fdividef(float a, float b) { return a / b; }
template <class Value>
static Value __ldg(const Value* address) { return *address; }
template <class Value>
static Value atomicAdd(Value* address, Value by) {
    Value before = *address;
    *address += by;
    return before;
}
template <class A, class B>
static auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
template <class A, class B>
static auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }

static inline float emulated_half_to_float(unsigned short bits) { return (float)emulation::from_bits<_Float16>(bits); }
static inline unsigned short emulated_float_to_half(float x) { return (unsigned short)emulation::as_bits((_Float16)x); }
