// Selective scan, forward (Gu and Dao 2023, "Mamba", equations 2a and 2b, with its discretisation):
//
//     d = softplus(delta + delta_bias)        h[t] = exp(d A) h[t - 1] + d u[t] B[t]        out = (C[t] . h[t] + D u[t]) silu(z)
//
// Mapping. A channel (or EACH of them) belongs to LANES neighbouring lanes; each keeps STATES / LANES of its states in
// registers for the whole sequence and walks through time. Nothing but B and C is shared between warps:
//
//     lane   0        1        ...  LANES-1 | LANES ...               one tile: STEPS = VECTOR * LANES steps
//     scan   n = 0, LANES, ..  1, ..        | next channel            global -> d, d u (fp32, shared), B, C (fp32, shared)
//     move   steps 0..VECTOR-1, VECTOR.. , ...                        scan   -> y over d, in place
//                                                                     y, u, z -> out
//
// While a tile is scanned the next one's u, delta, z, B and C are on their way into registers; B and C have two buffers, so
// that there is one barrier a tile. y is summed over the LANES lanes for four steps at a time (transposing exchanges).
// exp is exp2 with A multiplied by log2(e) beforehand. Small batches: time is cut into segments; STATE_ONLY first finds what
// each segment adds to the state (out = nothing), then every block folds the segments before its own into its initial state.
//
// Bytes: u, delta, z, out once, B and C once a block of THREADS / LANES * EACH channels. Operations for a state and step:
// 1 exp2 (16 a clock and multiprocessor), 2 multiplications, 2 fused multiply-adds, 2 floats from shared memory. Floors on an
// H200, N 16, D 2048, batch 4, L 8192, bf16: 0.16 ms for the bytes, 0.32 for the special functions (softplus, silu included).
// Measured: 0.59 ms there; 0.25 (batch 8, L 2048), 0.115 (32, 256), 1.60 (1, 65536: 1.0 for the scan, 0.6 for STATE_ONLY).
// What bounds it (ncu, batch 8): shared memory's 128 bytes a clock 78 %, issue of instructions 57 %, special functions about
// 63 %, with 3.5 warps a scheduler: all of them near, and too few warps to hide what is left.
//
// Tried and lost (ms; the same sizes). EACH = 2 or 4 channels a lane, to read B and C from shared memory once for all of them:
// registers leave too few warps (batch 8: 0.256 to 0.30 against 0.254; batch 4: 0.65 against 0.59). Lanes of different channels
// side by side in the warp: shared memory hands out 128 bytes a clock whatever lanes share, and 16-byte accesses to global memory
// touch twice the sectors (0.274 against 0.256). 16 lanes a channel instead of cutting time: 3.5 at L 65536. A cap of 96
// or 80 registers for more warps: 0.30 against 0.255. Not tried: exp2 by a polynomial for a part of the states (by count
// it can win in STATE_ONLY alone, a tenth). Next, for batch 1: warps of a block taking turns along time, with exp2 kept in
// registers between a local scan and the one with the state handed on, so that nothing is computed twice.
//
// Macros: X; LANES, STATES (a multiple of LANES, >= dstate), EACH, VECTOR (elements a lane moves at once), THREADS, MIN_BLOCKS
// (a multiprocessor: caps the registers), MATRIX_BUFFERS; GATED, SOFTPLUS, STATE_ONLY; PACKED and MATRIX_PACKED (u, delta, z,
// out; B and C: see load_steps).
#include "selective_scan.cuh"

#define STEPS (VECTOR * LANES)
#define ROW (STEPS + 4)  // floats from row to row in shared memory: no bank conflicts for rows read side by side
#define OWN (STATES / LANES)
#define WARP_ROWS (32 / LANES)
#define WARP_CHANNELS (WARP_ROWS * EACH)
#define WARPS (THREADS / 32)
#if OWN * EACH >= 8 && __CUDA_ARCH__ != 900
#define GROUPS 1  // of four steps at once: elsewhere two of them spill a register or two
#else
#define GROUPS 2
#endif
#define MATRIX_VECTOR (STEPS * sizeof(X) < 16 ? STEPS : int(16 / sizeof(X)))
#define MATRIX_ROW_VECTORS (STEPS / MATRIX_VECTOR)
#define MATRICES (STATE_ONLY ? 1 : 2)
#define MATRIX_LOADS ((MATRICES * STATES * MATRIX_ROW_VECTORS + THREADS - 1) / THREADS)
#define MATRIX_FLOATS (STATES * ROW)

struct SelectiveScanForwardParameters {
    const void* u;
    const void* delta;
    const void* z;
    const void* B;
    const void* C;
    const float* A;
    const float* D;
    const float* delta_bias;
    const float* initial_state;
    void* out;
    float* last_state;
    float* checkpoints;     // (batch, dim, pieces, dstate)
    float* segment_states;  // (batch, dim, segments, dstate)
    float* segment_deltas;  // (batch, dim, segments): sums of d
    long long u_stride[3];  // batch, channel, step
    long long delta_stride[3];
    long long z_stride[3];
    long long out_stride[3];
    long long B_stride[4];  // batch, group, state, step
    long long C_stride[4];
    long long A_stride[2];
    long long initial_stride[3];
    int dim, group_dim, group_blocks, seqlen, dstate, pieces, segments, segment_length;
    int u_packed, delta_packed, z_packed, out_packed, B_packed, C_packed;
};

// Kept in registers between its way in and its way out.
struct Moving {
    Raw<VECTOR> u[EACH], delta[EACH], z[EACH];
    Raw<MATRIX_VECTOR> matrix[MATRIX_LOADS];
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) selective_scan_forward(const SelectiveScanForwardParameters p) {
    DYNAMIC_SHARED(shared_memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int q = lane % LANES, row = lane / LANES;  // its channels: rows row, row + WARP_ROWS, ...
    float* const delta_row = reinterpret_cast<float*>(shared_memory) + (warp * 2 * WARP_CHANNELS + row) * ROW;
    float* const input_row = delta_row + WARP_CHANNELS * ROW;
    float* const matrices = reinterpret_cast<float*>(shared_memory) + WARPS * 2 * WARP_CHANNELS * ROW;

    // blockIdx.x = (batch, group, block of the group's channels); blockIdx.y = segment.
    const int groups = p.dim / p.group_dim;
    const int batch = blockIdx.x / (groups * p.group_blocks);
    const int group = blockIdx.x / p.group_blocks % groups;
    const int in_group = blockIdx.x % p.group_blocks * (WARPS * WARP_CHANNELS) + warp * WARP_CHANNELS + row;
    const int channel = group * p.group_dim + in_group;  // the first; those from group_dim on do not exist
    const int segment = blockIdx.y;
    const int begin = segment * p.segment_length;
    const int end = min(p.seqlen, begin + p.segment_length);

    const X* const u = static_cast<const X*>(p.u) + batch * p.u_stride[0] + channel * p.u_stride[1];
    const X* const delta = static_cast<const X*>(p.delta) + batch * p.delta_stride[0] + channel * p.delta_stride[1];
    const X* const z = static_cast<const X*>(p.z) + batch * p.z_stride[0] + channel * p.z_stride[1];
    X* const out = static_cast<X*>(p.out) + batch * p.out_stride[0] + channel * p.out_stride[1];
    const X* const B = static_cast<const X*>(p.B) + batch * p.B_stride[0] + group * p.B_stride[1];
    const X* const C = static_cast<const X*>(p.C) + batch * p.C_stride[0] + group * p.C_stride[1];
    const i64 sequence = (i64)batch * p.dim + channel;

    float bias[EACH], skip[EACH], A[EACH][OWN], h[EACH][OWN];
    int moved_end[EACH];  // a channel that does not exist moves nothing
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const bool exists = in_group + e * WARP_ROWS < p.group_dim;
        const i64 own = exists ? channel + e * WARP_ROWS : 0;
        bias[e] = p.delta_bias ? p.delta_bias[own] : 0.0f;
        skip[e] = p.D ? p.D[own] : 0.0f;
        moved_end[e] = exists ? end : begin;
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            const int n = j * LANES + q;
            A[e][j] = n < p.dstate ? LOG2E * p.A[own * p.A_stride[0] + n * p.A_stride[1]] : 0.0f;
            h[e][j] = 0.0f;
            if (!STATE_ONLY && exists && n < p.dstate && p.initial_state)
                h[e][j] = p.initial_state[batch * p.initial_stride[0] + own * p.initial_stride[1] + n * p.initial_stride[2]];
        }
        if (!STATE_ONLY && exists) {
#pragma unroll 4
            for (int s = 0; s < segment; ++s) {
                const i64 at = (sequence + e * WARP_ROWS) * p.segments + s;
#pragma unroll
                for (int j = 0; j < OWN; ++j) {
                    const int n = j * LANES + q;
                    const float added = n < p.dstate ? p.segment_states[at * p.dstate + n] : 0.0f;
                    h[e][j] = fmaf(fast_exp2(A[e][j] * p.segment_deltas[at]), h[e][j], added);
                }
            }
        }
    }

    const auto fetch = [&](int tile, Moving& moving) {
        const int t = tile + q * VECTOR;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const i64 on = e * WARP_ROWS;
            moving.delta[e] = load_steps<VECTOR, PACKED>(
                delta + on * p.delta_stride[1], p.delta_stride[2], p.delta_packed, t, moved_end[e]);
            moving.u[e] =
                load_steps<VECTOR, PACKED>(u + on * p.u_stride[1], p.u_stride[2], p.u_packed, t, moved_end[e]);
            if (GATED && !STATE_ONLY)
                moving.z[e] =
                    load_steps<VECTOR, PACKED>(z + on * p.z_stride[1], p.z_stride[2], p.z_packed, t, moved_end[e]);
        }
#pragma unroll
        for (int k = 0; k < MATRIX_LOADS; ++k) {
            const int vector = threadIdx.x + k * THREADS;
            const int n = vector / MATRIX_ROW_VECTORS % STATES;
            const bool second = vector / MATRIX_ROW_VECTORS >= STATES;
            const int matrix_t = tile + vector % MATRIX_ROW_VECTORS * MATRIX_VECTOR;
            const int matrix_end = n < p.dstate && vector < MATRICES * STATES * MATRIX_ROW_VECTORS ? end : begin;
            moving.matrix[k] = load_steps<MATRIX_VECTOR, MATRIX_PACKED>(
                second ? C + n * p.C_stride[2] : B + n * p.B_stride[2], second ? p.C_stride[3] : p.B_stride[3],
                second ? p.C_packed : p.B_packed, matrix_t, matrix_end);
        }
    };

    float delta_sum[EACH] = {};
    const auto place = [&](int tile, const Moving& moving, float* buffer) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            float d[VECTOR], input[VECTOR];
            unpack(moving.delta[e], d);
            unpack(moving.u[e], input);
            const int valid = moved_end[e] - (tile + q * VECTOR);  // PACKED: all or none
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const float x = d[i] + bias[e];
                d[i] = SOFTPLUS ? branchless_softplus(x) : x;
                if ((PACKED ? 0 : i) >= valid) d[i] = 0.0f;  // as if there were no such step
                input[i] *= d[i];
                if (STATE_ONLY) delta_sum[e] += d[i];
            }
            store_floats(delta_row + e * WARP_ROWS * ROW + q * VECTOR, d);
            store_floats(input_row + e * WARP_ROWS * ROW + q * VECTOR, input);
        }
#pragma unroll
        for (int k = 0; k < MATRIX_LOADS; ++k) {
            const int vector = threadIdx.x + k * THREADS;
            if (vector < MATRICES * STATES * MATRIX_ROW_VECTORS) {
                float value[MATRIX_VECTOR];
                unpack(moving.matrix[k], value);
                store_floats(
                    buffer + vector / MATRIX_ROW_VECTORS * ROW + vector % MATRIX_ROW_VECTORS * MATRIX_VECTOR, value);
            }
        }
    };

    Moving moving;
    fetch(begin, moving);
    place(begin, moving, matrices);
    int buffer = 0;
    for (int tile = begin; tile < end; tile += STEPS) {
        Raw<VECTOR> tile_u[EACH], tile_z[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            tile_u[e] = moving.u[e];
            tile_z[e] = moving.z[e];
        }
        __syncthreads();
        const bool more = tile + STEPS < end;
        if (more) fetch(tile + STEPS, moving);

        if (!STATE_ONLY && p.checkpoints && tile % PIECE == 0) {
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                float* const kept = p.checkpoints + ((sequence + e * WARP_ROWS) * p.pieces + tile / PIECE) * p.dstate;
#pragma unroll
                for (int j = 0; j < OWN; ++j)
                    if (moved_end[e] > begin && j * LANES + q < p.dstate) kept[j * LANES + q] = h[e][j];
            }
        }

        const float* const B_rows = matrices + buffer * (MATRICES * MATRIX_FLOATS) + q * ROW;
        const float* const C_rows = B_rows + MATRIX_FLOATS;
#pragma unroll GROUPS
        for (int t = 0; t < STEPS; t += 4) {
            float d[EACH][4], input[EACH][4], y[EACH][4] = {};
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                load_floats(delta_row + e * WARP_ROWS * ROW + t, d[e]);
                load_floats(input_row + e * WARP_ROWS * ROW + t, input[e]);
            }
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
                float b[4], c[4];
                load_floats(B_rows + j * (LANES * ROW) + t, b);
                if (!STATE_ONLY) load_floats(C_rows + j * (LANES * ROW) + t, c);
#pragma unroll
                for (int e = 0; e < EACH; ++e) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        h[e][j] = fmaf(fast_exp2(d[e][i] * A[e][j]), h[e][j], input[e][i] * b[i]);
                        if (!STATE_ONLY) y[e][i] = fmaf(h[e][j], c[i], y[e][i]);
                    }
                }
            }
            if (!STATE_ONLY) {
                __syncwarp();
#pragma unroll
                for (int e = 0; e < EACH; ++e) {
                    float* const y_row = delta_row + e * WARP_ROWS * ROW + t;
#if LANES == 1
                    store_floats(y_row, y[e]);
#elif LANES == 2
                    const float keep[2] = {q ? y[e][2] : y[e][0], q ? y[e][3] : y[e][1]};
                    const float give[2] = {q ? y[e][0] : y[e][2], q ? y[e][1] : y[e][3]};
                    const float sum[2] = {
                        keep[0] + __shfl_xor_sync(ALL_LANES, give[0], 1), keep[1] + __shfl_xor_sync(ALL_LANES, give[1], 1)};
                    store_floats(y_row + 2 * q, sum);
#else
                    const float sum = sum_four_over_lanes<LANES>(y[e], q);
                    if (q < 4) y_row[(q & 1) * 2 + (q >> 1)] = sum;
#endif
                }
            }
        }
        __syncwarp();

        if (!STATE_ONLY) {
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                float y[VECTOR], own_u[VECTOR], gate[VECTOR];
                load_floats(delta_row + e * WARP_ROWS * ROW + q * VECTOR, y);
                unpack(tile_u[e], own_u);
                unpack(tile_z[e], gate);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) {
                    y[i] = fmaf(skip[e], own_u[i], y[i]);
                    if (GATED) y[i] *= silu(gate[i]);
                }
                store_steps<VECTOR, PACKED>(
                    out + (i64)(e * WARP_ROWS) * p.out_stride[1], p.out_stride[2], p.out_packed, tile + q * VECTOR,
                    moved_end[e], y);
            }
        }
        if (more) {
            if (MATRIX_BUFFERS == 2) {
                buffer ^= 1;
            } else {
                __syncthreads();
            }
            place(tile + STEPS, moving, matrices + buffer * (MATRICES * MATRIX_FLOATS));
        }
    }

#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const i64 own = sequence + e * WARP_ROWS;
        const bool exists = moved_end[e] > begin;
        if (STATE_ONLY) {
            delta_sum[e] = sum_over_lanes<LANES>(delta_sum[e]);
            if (exists && q == 0) p.segment_deltas[own * p.segments + segment] = delta_sum[e];
        }
        if (exists && (STATE_ONLY || end == p.seqlen)) {
            float* const kept =
                STATE_ONLY ? p.segment_states + (own * p.segments + segment) * p.dstate : p.last_state + own * p.dstate;
#pragma unroll
            for (int j = 0; j < OWN; ++j)
                if (j * LANES + q < p.dstate) kept[j * LANES + q] = h[e][j];
        }
    }
}
