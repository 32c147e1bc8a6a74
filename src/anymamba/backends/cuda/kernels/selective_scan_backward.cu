// Selective scan, backward. With the names of selective_scan_forward.cu, dy[t] = dout[t] silu(z[t]), per channel and state:
//
//     g[t] = C[t] dy[t] + a[t + 1] g[t + 1],   a[t] = exp(d[t] A),   last step: + dlast_state        (gradient into h[t])
//     dC[t] = sum over channels dy[t] h[t]                dB[t] = sum over channels g[t] d[t] u[t]
//     dA = sum over t, batch  d[t] g[t] a[t] h[t - 1]     dinitial_state = a[0] g[0]
//     s[t] = sum_n g[t] B[t],   r[t] = sum_n A g[t] a[t] h[t - 1]                  (the chain rule, written out by hand)
//     du = d s + D dy,   dd = u s + r,   ddelta = dd softplus'(delta + bias),   dz = dout (y + D u) silu'(z),   dD = sum dy u
//
// h is computed again from the states kept every PIECE = 128 steps, in two levels: a sweep forward over the piece keeps the
// state entering every BLOCK steps in shared memory; then, from the last block to the first, the block is run forward once more,
// this time keeping a[t] and h[t] of BLOCK steps in registers, and at once backward. So exp is computed twice.
//
// Mapping: as in the forward, LANES neighbouring lanes a channel, STATES / LANES states a lane, a warp walks through time.
//     sums over states (s, r, y): over the LANES lanes, four steps at a time, transposing
//     sums over channels (dB, dC): over the 32 / LANES channels of the warp; the lanes of different channels hold their states
//         in different registers (n = (j ^ turn) LANES + q), so halving needs no selects; then over the warps through shared
//         memory, in order; then over blocks by atomic additions, or, ORDERED, into a slice for each block, summed afterwards.
// Small batches: time is cut into segments; CARRY_ONLY first finds what each segment hands to the one before it.
//
// Bytes: u, delta twice, z, dout once, du, ddelta, dz once. Operations for a state and step: 2 exp2, 15 multiply-adds or like,
// 3 exchanges, 8 floats from shared memory. Floors on an H200, N 16, batch 4, L 8192, D 2048, bf16: 0.22 ms for the bytes, 0.6 for
// special functions, about 1.4 for issuing its instructions. Measured: 2.2 ms there; 1.1 (batch 8, L 2048), 0.54 (32, 256),
// 5.1 (1, 65536). What bounds it (ncu, batch 8): shared memory's 128 bytes a clock 77 %, issue 62 %, 3.7 warps a scheduler.
// ORDERED costs 13 % at batch 4, L 8192 (2.69 against 2.39 with zeroing and rounding), so it is not the default.
//
// Tried and lost (ms, batch 4 and batch 32): 4 lanes a channel with 4 states each (2.34, 0.55: fewer instructions, but
// shared memory for 12 warps only); BLOCK 16 (2.18, 0.54: as fast, spills 28 bytes); tiles of 64 steps (2.4, 0.51); 256 or 64
// threads (2.31, 0.57; 2.25, 0.555); 96 registers (2.25, 0.55). Next: two channels a lane, so that B and C are read
// and dB and dC exchanged once for both; blocks of 64 threads on cards with 64 KB of shared memory.
//
// Macros: X; LANES, STATES (LANES times a power of two), VECTOR, THREADS, MIN_BLOCKS; TILE (steps in shared memory, divides
// PIECE), BLOCK (divides TILE, multiple of 4); GATED, SOFTPLUS, CARRY_ONLY, PACKED, MATRIX_PACKED, ORDERED.
#include "selective_scan.cuh"

#define ROW (TILE + 4)
#define OWN (STATES / LANES)
#define WARP_CHANNELS (32 / LANES)
#define WARPS (THREADS / 32)
#define SLOTS (TILE / (VECTOR * LANES))
#define MATRIX_VECTOR (TILE * sizeof(X) < 16 ? TILE : int(16 / sizeof(X)))
#define MATRIX_ROW_VECTORS (TILE / MATRIX_VECTOR)
#define MATRIX_LOADS ((2 * STATES * MATRIX_ROW_VECTORS + THREADS - 1) / THREADS)
#define IN_PLACE (WARPS == 1)  // dB and dC take the place of B and C in shared memory

struct SelectiveScanBackwardParameters {
    const void* u;
    const void* delta;
    const void* z;
    const void* B;
    const void* C;
    const void* dout;
    const float* A;
    const float* D;
    const float* delta_bias;
    const float* checkpoints;  // (batch, dim, pieces, dstate)
    const float* dlast_state;
    void* du;
    void* ddelta;
    void* dz;
    void* out;              // y again, gated
    float* dB;              // (slices, batch, groups, dstate, seqlen)
    float* dC;
    float* dA;              // (slices, dim, dstate), here a slice is a batch entry's segment
    float* dD;              // (slices, dim)
    float* ddelta_bias;
    float* dinitial_state;  // (batch, dim, dstate)
    float* carries;         // (batch, dim, segments, dstate): a g of the first step, the later segments left out
    float* segment_deltas;  // (batch, dim, segments): sums of d
    long long u_stride[3];  // batch, channel, step
    long long delta_stride[3];
    long long z_stride[3];
    long long dout_stride[3];
    long long du_stride[3];
    long long ddelta_stride[3];
    long long dz_stride[3];
    long long out_stride[3];
    long long B_stride[4];  // batch, group, state, step
    long long C_stride[4];
    long long A_stride[2];
    long long dlast_stride[3];
    int batches, dim, group_dim, group_blocks, seqlen, dstate, pieces, segments, segment_length;
    int u_packed, delta_packed, z_packed, dout_packed, du_packed, ddelta_packed, dz_packed, out_packed, B_packed, C_packed;
};

// One value of each register of the lane, to be summed over the channels of the warp; see the mapping above.
struct Halved {
    static constexpr int channels = WARP_CHANNELS;
    static constexpr int left = OWN > channels ? OWN / channels : 1;  // states a lane still holds at the end
    static constexpr bool split = channels > OWN;                     // and of B and C only one
};

__device__ __forceinline__ void sum_over_channels(float (&b)[OWN], float (&c)[OWN], int slot) {
    int held = OWN;
    bool split = false;
#pragma unroll
    for (int bit = 0; (1 << bit) < WARP_CHANNELS; ++bit) {
        const int distance = LANES << bit;
        if (held > 1) {
            held /= 2;
#pragma unroll
            for (int j = 0; j < held; ++j) {
                b[j] += __shfl_xor_sync(ALL_LANES, b[j + held], distance);
                c[j] += __shfl_xor_sync(ALL_LANES, c[j + held], distance);
            }
        } else if (!split) {
            split = true;
            const bool second = slot >> bit & 1;
            const float keep = second ? c[0] : b[0], give = second ? b[0] : c[0];
            b[0] = keep + __shfl_xor_sync(ALL_LANES, give, distance);
        } else {
            b[0] += __shfl_xor_sync(ALL_LANES, b[0], distance);
        }
    }
}

__device__ __forceinline__ void add(float* address, float value, bool ordered) {
    if (ordered) {
        *address = value;
    } else {
        atomicAdd(address, value);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    selective_scan_backward(const SelectiveScanBackwardParameters p) {
    DYNAMIC_SHARED(shared_memory);
    float* const shared = reinterpret_cast<float*>(shared_memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int q = lane % LANES, slot = lane / LANES;
    float* const delta_row = shared + (warp * 3 * WARP_CHANNELS + slot) * ROW;  // d, then r
    float* const input_row = delta_row + WARP_CHANNELS * ROW;                   // d u, then s
    float* const dy_row = input_row + WARP_CHANNELS * ROW;                      // dy, then y
    float* const matrices = shared + WARPS * 3 * WARP_CHANNELS * ROW;           // B, C: (2, STATES, ROW)
    float* const parts = IN_PLACE ? matrices : matrices + 2 * STATES * ROW;     // dB, dC: (WARPS, 2, STATES, ROW)
    float* const kept = IN_PLACE ? matrices + 2 * STATES * ROW : parts + WARPS * 2 * STATES * ROW;  // (blocks, THREADS, OWN)

    const int groups = p.dim / p.group_dim;
    const int batch = blockIdx.x / (groups * p.group_blocks);
    const int group = blockIdx.x / p.group_blocks % groups;
    const int group_block = blockIdx.x % p.group_blocks;
    const int in_group = group_block * (WARPS * WARP_CHANNELS) + warp * WARP_CHANNELS + slot;
    const bool exists = in_group < p.group_dim;
    const int channel = group * p.group_dim + (exists ? in_group : 0);
    const int segment = blockIdx.y + CARRY_ONLY;  // nothing is before the first
    const int begin = segment * p.segment_length;
    const int end = min(p.seqlen, begin + p.segment_length);

    const i64 at_batch = batch, at_channel = channel;
    const X* const u = static_cast<const X*>(p.u) + at_batch * p.u_stride[0] + at_channel * p.u_stride[1];
    const X* const delta = static_cast<const X*>(p.delta) + at_batch * p.delta_stride[0] + at_channel * p.delta_stride[1];
    const X* const z = static_cast<const X*>(p.z) + at_batch * p.z_stride[0] + at_channel * p.z_stride[1];
    const X* const dout = static_cast<const X*>(p.dout) + at_batch * p.dout_stride[0] + at_channel * p.dout_stride[1];
    const X* const B = static_cast<const X*>(p.B) + at_batch * p.B_stride[0] + group * p.B_stride[1];
    const X* const C = static_cast<const X*>(p.C) + at_batch * p.C_stride[0] + group * p.C_stride[1];
    const i64 sequence = at_batch * p.dim + channel;
    const float bias = p.delta_bias ? p.delta_bias[channel] : 0.0f;
    const float skip = p.D ? p.D[channel] : 0.0f;

    // Register j holds state (j ^ turn) * LANES + q.
    int turn = 0;
#pragma unroll
    for (int bit = 0; (1 << bit) < WARP_CHANNELS; ++bit)
        if (OWN >> (bit + 1) > 0) turn |= (slot >> bit & 1) * (OWN >> (bit + 1));

    float A[OWN], dA[OWN], carry[OWN];
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
        const int n = (j ^ turn) * LANES + q;
        A[j] = n < p.dstate ? LOG2E * p.A[at_channel * p.A_stride[0] + n * p.A_stride[1]] : 0.0f;
        dA[j] = 0.0f;
        carry[j] = 0.0f;
        if (!CARRY_ONLY && exists && n < p.dstate && p.dlast_state)
            carry[j] = p.dlast_state[at_batch * p.dlast_stride[0] + at_channel * p.dlast_stride[1] + n * p.dlast_stride[2]];
    }
    if (!CARRY_ONLY && exists) {
#pragma unroll 4
        for (int s = p.segments - 1; s > segment; --s) {
            const i64 at = sequence * p.segments + s;
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
                const int n = (j ^ turn) * LANES + q;
                const float added = n < p.dstate ? p.carries[at * p.dstate + n] : 0.0f;
                carry[j] = fmaf(fast_exp2(A[j] * p.segment_deltas[at]), carry[j], added);
            }
        }
    }

    float dD = 0.0f, dbias = 0.0f, delta_sum = 0.0f;
    Raw<VECTOR> tile_u[SLOTS], tile_delta[SLOTS], tile_z[SLOTS], tile_dout[SLOTS];

    const auto matrix_row = [&](int row) {
        return row >= STATES ? C + (row - STATES) * p.C_stride[2] : B + row * p.B_stride[2];
    };
    const X* const first_matrix_row = matrix_row(threadIdx.x / MATRIX_ROW_VECTORS);

    // Brings a tile to shared memory: d, d u and B for the sweep forward; dy and C too for the way back.
    const auto place = [&](int tile, bool all) {
        const int tile_end = min(end, tile + TILE);
        const int moved_end = exists ? tile_end : tile;
#pragma unroll
        for (int slice = 0; slice < SLOTS; ++slice) {
            const int t = tile + (slice * LANES + q) * VECTOR;
            tile_delta[slice] = load_steps<VECTOR, PACKED>(delta, p.delta_stride[2], p.delta_packed, t, moved_end);
            if (!CARRY_ONLY) tile_u[slice] = load_steps<VECTOR, PACKED>(u, p.u_stride[2], p.u_packed, t, moved_end);
            if (all) {
                tile_dout[slice] = load_steps<VECTOR, PACKED>(dout, p.dout_stride[2], p.dout_packed, t, moved_end);
                if (GATED) tile_z[slice] = load_steps<VECTOR, PACKED>(z, p.z_stride[2], p.z_packed, t, moved_end);
            }
        }
#pragma unroll
        for (int k = 0; k < MATRIX_LOADS; ++k) {
            const int row = threadIdx.x / MATRIX_ROW_VECTORS + k * (THREADS / MATRIX_ROW_VECTORS);
            const bool second = row >= STATES;
            if (row < 2 * STATES && (second ? all : !CARRY_ONLY)) {
                const int t = threadIdx.x % MATRIX_ROW_VECTORS * MATRIX_VECTOR;
                float value[MATRIX_VECTOR];
                unpack(
                    load_steps<MATRIX_VECTOR, MATRIX_PACKED>(
                        k == 0 ? first_matrix_row : matrix_row(row), second ? p.C_stride[3] : p.B_stride[3],
                        second ? p.C_packed : p.B_packed, tile + t, row % STATES < p.dstate ? tile_end : tile),
                    value);
                store_floats(matrices + row * ROW + t, value);
            }
        }
#pragma unroll
        for (int slice = 0; slice < SLOTS; ++slice) {
            const int t = (slice * LANES + q) * VECTOR;
            const int valid = moved_end - (tile + t);
            float d[VECTOR], input[VECTOR];
            unpack(tile_delta[slice], d);
            unpack(tile_u[slice], input);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const float x = d[i] + bias;
                d[i] = SOFTPLUS ? branchless_softplus(x) : x;
                if ((PACKED ? 0 : i) >= valid) d[i] = 0.0f;
                input[i] *= d[i];
                if (CARRY_ONLY) delta_sum += d[i];
            }
            store_floats(delta_row + t, d);
            if (!CARRY_ONLY) store_floats(input_row + t, input);
            if (all) {
                float dy[VECTOR], gate[VECTOR];
                unpack(tile_dout[slice], dy);
                if (GATED) {
                    unpack(tile_z[slice], gate);
#pragma unroll
                    for (int i = 0; i < VECTOR; ++i) dy[i] *= silu(gate[i]);
                }
                store_floats(dy_row + t, dy);
            }
        }
    };

    const float* rows[OWN];  // of B; C is STATES rows further
#pragma unroll
    for (int j = 0; j < OWN; ++j) rows[j] = matrices + ((j ^ turn) * LANES + q) * ROW;

#if CARRY_ONLY
    for (int tile = begin + (end - 1 - begin) / TILE * TILE; tile >= begin; tile -= TILE) {
        __syncthreads();
        place(tile, true);
        __syncthreads();
#pragma unroll 2
        for (int t = TILE - 4; t >= 0; t -= 4) {
            float d[4], dy[4];
            load_floats(delta_row + t, d);
            load_floats(dy_row + t, dy);
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
                float c[4];
                load_floats(rows[j] + STATES * ROW + t, c);
#pragma unroll
                for (int i = 3; i >= 0; --i) carry[j] = fast_exp2(d[i] * A[j]) * fmaf(c[i], dy[i], carry[j]);
            }
        }
    }
    delta_sum = sum_over_lanes<LANES>(delta_sum);
    if (exists) {
        const i64 at = sequence * p.segments + segment;
        if (q == 0) p.segment_deltas[at] = delta_sum;
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            const int n = (j ^ turn) * LANES + q;
            if (n < p.dstate) p.carries[at * p.dstate + n] = carry[j];
        }
    }
#else
    // After the sums over channels: which row of parts this lane writes, if any.
    const bool writes_second = Halved::split && slot / OWN % 2;
    const bool writes = !Halved::split || slot < 2 * OWN;
    float* const part = parts + (IN_PLACE ? 0 : warp * 2 * STATES * ROW) + (writes_second ? STATES * ROW : 0);

    for (int piece = begin + (end - 1 - begin) / PIECE * PIECE; piece >= begin; piece -= PIECE) {
        const int last_tile = piece + (min(end - piece, PIECE) - 1) / TILE * TILE;
        {
            float h[OWN];
            const float* const entering = p.checkpoints + (sequence * p.pieces + piece / PIECE) * p.dstate;
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
                const int n = (j ^ turn) * LANES + q;
                h[j] = exists && n < p.dstate ? entering[n] : 0.0f;
            }
#pragma unroll 1
            for (int tile = piece; tile <= last_tile; tile += TILE) {
                __syncthreads();
                place(tile, tile == last_tile);
                __syncthreads();
#pragma unroll 1
                for (int block = 0; block < TILE; block += BLOCK) {
                    store_floats(kept + ((tile - piece + block) / BLOCK * THREADS + threadIdx.x) * OWN, h);
                    if (tile == last_tile && block + BLOCK == TILE) break;
#pragma unroll
                    for (int t = block; t < block + BLOCK; t += 4) {
                        float d[4], input[4];
                        load_floats(delta_row + t, d);
                        load_floats(input_row + t, input);
#pragma unroll
                        for (int j = 0; j < OWN; ++j) {
                            float b[4];
                            load_floats(rows[j] + t, b);
#pragma unroll
                            for (int i = 0; i < 4; ++i) h[j] = fmaf(fast_exp2(d[i] * A[j]), h[j], input[i] * b[i]);
                        }
                    }
                }
            }
        }

#pragma unroll 1
        for (int tile = last_tile; tile >= piece; tile -= TILE) {
            if (tile != last_tile) {
                __syncthreads();
                place(tile, true);
                __syncthreads();
            }
#pragma unroll 1
            for (int block = TILE - BLOCK; block >= 0; block -= BLOCK) {
                float a[OWN][BLOCK], h[OWN][BLOCK + 1];  // h[j][t + 1] is the state after step t
                {
                    float entering[OWN];
                    load_floats(kept + ((tile - piece + block) / BLOCK * THREADS + threadIdx.x) * OWN, entering);
#pragma unroll
                    for (int j = 0; j < OWN; ++j) h[j][0] = entering[j];
                }
#pragma unroll
                for (int t = 0; t < BLOCK; t += 4) {
                    float d[4], input[4];
                    load_floats(delta_row + block + t, d);
                    load_floats(input_row + block + t, input);
#pragma unroll
                    for (int j = 0; j < OWN; ++j) {
                        float b[4];
                        load_floats(rows[j] + block + t, b);
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            a[j][t + i] = fast_exp2(d[i] * A[j]);
                            h[j][t + i + 1] = fmaf(a[j][t + i], h[j][t + i], input[i] * b[i]);
                        }
                    }
                }
#pragma unroll
                for (int t = BLOCK - 4; t >= 0; t -= 4) {
                    float d[4], input[4], dy[4], b[OWN][4], c[OWN][4];
                    load_floats(delta_row + block + t, d);
                    load_floats(input_row + block + t, input);
                    load_floats(dy_row + block + t, dy);
#pragma unroll
                    for (int j = 0; j < OWN; ++j) {
                        load_floats(rows[j] + block + t, b[j]);
                        load_floats(rows[j] + STATES * ROW + block + t, c[j]);
                    }
                    float r[4] = {0.0f, 0.0f, 0.0f, 0.0f}, s[4] = {0.0f, 0.0f, 0.0f, 0.0f}, y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    float first[Halved::left][4], second[Halved::left][4];
#pragma unroll
                    for (int i = 3; i >= 0; --i) {
                        float db[OWN], dc[OWN];
#pragma unroll
                        for (int j = 0; j < OWN; ++j) {
                            const float g = fmaf(c[j][i], dy[i], carry[j]);
                            const float after = h[j][t + i + 1];
                            if (GATED) y[i] = fmaf(after, c[j][i], y[i]);
                            dc[j] = dy[i] * after;
                            db[j] = g * input[i];
                            s[i] = fmaf(g, b[j][i], s[i]);
                            carry[j] = a[j][t + i] * g;
                            const float w = carry[j] * h[j][t + i];
                            r[i] = fmaf(A[j], w, r[i]);
                            dA[j] = fmaf(d[i], w, dA[j]);
                        }
                        sum_over_channels(db, dc, slot);
#pragma unroll
                        for (int j = 0; j < Halved::left; ++j) {
                            first[j][i] = db[j];
                            second[j][i] = dc[j];
                        }
                    }
                    const float r_sum = sum_four_over_lanes<LANES>(r, q), s_sum = sum_four_over_lanes<LANES>(s, q);
                    const float y_sum = GATED ? sum_four_over_lanes<LANES>(y, q) : 0.0f;
                    __syncwarp();
                    if (q < 4) {
                        const int at = block + t + (q & 1) * 2 + (q >> 1);
                        delta_row[at] = r_sum;
                        input_row[at] = s_sum;
                        if (GATED) dy_row[at] = y_sum;
                    }
#pragma unroll
                    for (int j = 0; j < Halved::left; ++j) {
                        float* const row = part + ((j ^ turn) * LANES + q) * ROW + block + t;
                        if (writes) store_floats(row, first[j]);
                        if (!Halved::split) store_floats(row + STATES * ROW, second[j]);
                    }
                }
            }
            __syncthreads();

            // dB and dC of the tile: the warps' parts, in order.
            {
                const int t = threadIdx.x % TILE;
                const i64 slice = ORDERED ? group_block : 0;
                i64 at = (((slice * p.batches + batch) * groups + group) * p.dstate + threadIdx.x / TILE) * p.seqlen + tile + t;
                const float* source = parts + threadIdx.x / TILE * ROW + t;
#pragma unroll 4
                for (int n = threadIdx.x / TILE; n < STATES; n += THREADS / TILE) {
                    float db = source[0], dc = source[STATES * ROW];
#pragma unroll
                    for (int w = 1; w < WARPS; ++w) {
                        db += source[w * 2 * STATES * ROW];
                        dc += source[(w * 2 + 1) * STATES * ROW];
                    }
                    if (n < p.dstate && tile + t < end) {
                        add(p.dB + at, db, ORDERED);
                        add(p.dC + at, dc, ORDERED);
                    }
                    at += (i64)(THREADS / TILE) * p.seqlen;
                    source += THREADS / TILE * ROW;
                }
            }

#pragma unroll
            for (int slice = 0; slice < SLOTS; ++slice) {
                const int t = (slice * LANES + q) * VECTOR;
                const int moved_end = exists ? end : tile;
                float own_u[VECTOR], x[VECTOR], own_dout[VECTOR], gate[VECTOR], r[VECTOR], s[VECTOR], y[VECTOR];
                unpack(tile_u[slice], own_u);
                unpack(tile_delta[slice], x);
                unpack(tile_dout[slice], own_dout);
                if (GATED) unpack(tile_z[slice], gate);
                load_floats(delta_row + t, r);
                load_floats(input_row + t, s);
                if (GATED) load_floats(dy_row + t, y);
                float du[VECTOR], ddelta[VECTOR], dz[VECTOR], out[VECTOR];
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) {
                    float dy = own_dout[i];
                    if (GATED) {
                        const float open = sigmoid(gate[i]), passed = gate[i] * open;
                        const float full = fmaf(skip, own_u[i], y[i]);
                        dz[i] = dy * full * fmaf(passed, 1.0f - open, open);
                        out[i] = full * passed;
                        dy *= passed;
                    }
                    x[i] += bias;
                    const float d = SOFTPLUS ? branchless_softplus(x[i]) : x[i];
                    du[i] = fmaf(d, s[i], skip * dy);
                    ddelta[i] = fmaf(own_u[i], s[i], LN2 * r[i]) * (SOFTPLUS ? sigmoid(x[i]) : 1.0f);
                    if (tile + t + i < moved_end) {
                        dD = fmaf(dy, own_u[i], dD);
                        dbias += ddelta[i];
                    }
                }
                X* const du_row = static_cast<X*>(p.du) + at_batch * p.du_stride[0] + at_channel * p.du_stride[1];
                X* const ddelta_row =
                    static_cast<X*>(p.ddelta) + at_batch * p.ddelta_stride[0] + at_channel * p.ddelta_stride[1];
                store_steps<VECTOR, PACKED>(du_row, p.du_stride[2], p.du_packed, tile + t, moved_end, du);
                store_steps<VECTOR, PACKED>(ddelta_row, p.ddelta_stride[2], p.ddelta_packed, tile + t, moved_end, ddelta);
                if (GATED) {
                    X* const dz_row = static_cast<X*>(p.dz) + at_batch * p.dz_stride[0] + at_channel * p.dz_stride[1];
                    store_steps<VECTOR, PACKED>(dz_row, p.dz_stride[2], p.dz_packed, tile + t, moved_end, dz);
                    if (p.out) {
                        X* const out_row = static_cast<X*>(p.out) + at_batch * p.out_stride[0] + at_channel * p.out_stride[1];
                        store_steps<VECTOR, PACKED>(out_row, p.out_stride[2], p.out_packed, tile + t, moved_end, out);
                    }
                }
            }
        }
    }

    const i64 slice = ORDERED ? batch * p.segments + segment : 0;
    if (exists) {
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            const int n = (j ^ turn) * LANES + q;
            if (n < p.dstate) {
                add(p.dA + (slice * p.dim + channel) * p.dstate + n, dA[j], ORDERED);
                if (p.dinitial_state && segment == 0) p.dinitial_state[sequence * p.dstate + n] = carry[j];
            }
        }
    }
    dD = sum_over_lanes<LANES>(dD);
    dbias = sum_over_lanes<LANES>(dbias);
    if (exists && q == 0) {
        if (p.dD) add(p.dD + slice * p.dim + channel, dD, ORDERED);
        if (p.ddelta_bias) add(p.ddelta_bias + slice * p.dim + channel, dbias, ORDERED);
    }
#endif
}
