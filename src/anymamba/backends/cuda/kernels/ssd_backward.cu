// State-space dual scan backward: all gradients of one chunk, for the heads of a group, given the states at the chunk's bounds.
//
// Algorithm (Dao and Gu 2024, arXiv:2405.21060, section 6, differentiated). ssd_states.cu has left S, the state that enters each
// chunk, and R, the gradient of the state that leaves it, so chunks depend on each other no more. With cs = cumsum(d*A*log2 e),
// j the step of an input, i >= j that of an output, L = exp2(cs[i]-cs[j]), e = exp2(cs[i]), w = exp2(cs[last]-cs[j]), G = dout:
//
//     T = B C^T (once for all heads)    M = X G^T    K = L T M
//     dX = d * (L T) G + d*w * B R^T + D G
//     dB = (sum over heads of d L M) C + sum over heads of d*w * X R
//     dC = (sum over heads of d L M)^T B + sum over heads of e * G S
//     d(d*A)[j] = sum over k < j <= i of d[k] K[k][i]    (pairs that step j lies between, found from sums of rows and columns)
//               + sum over i >= j of e C (S^T G) + sum over k < j of d*w X (B R^T) + exp2(cs[last]) <R, S>
//     dd = A d(d*A) + sum over i >= j of K + w X (B R^T)      then through clamp and softplus;  dA = sum of d * d(d*A)
//
// Every term of d(d*A) is summed as it stands: differences of large sums (out * dout - x * dx) would lose its digits.
// Sums over heads of a group stay in registers, so that the products of dB and dC within a chunk are made once. Where the heads of
// a group are split over several blocks, each leaves its sums and they are added afterwards, in order: no atomics.
//
// Thread mapping: WARPS warps = Q/16 strips of rows x PARTS. A warp has of the Q x Q matrices the tiles PART, PART + PARTS, ... of
// its strip (those on and above the diagonal), of dX the same tiles of columns, of dB and dC those of states. x, G (Q x PT), S and R
// (PT x NT) of the next head arrive by cp.async when STAGES is 2. One warp works out d and cs of the next head, another finishes
// the scalars of the last one. Two barriers a head, one of them among the warps of a strip.
//
// Bytes: x, G, dX once; S and R once; B and C once a block. Operations a step and head: 6*NT*PT (states) + about 2*Q*PT (half of M,
// half of dX). Floors on an H200, bf16, H32 P64 N128, batch 4, L 8192: 0.94 GB, 0.20 ms; 63 GFLOP, 0.08 ms.
// Measured with ssd_states (forward + backward less forward, ms): 1.31 there, 0.73 (batch 8, L 2048), 0.40 (32, 256), 4.9 (1, 65536).
// What bounds it is not profiled yet. Likely: warps that wait, at the barrier, for the one whose scalars come from memory (here
// and in ssd_states, where a chunk takes 3 us whatever its size), and shared memory (each fragment is loaded by four warps).
//
// Macros: X; Q, PT (>= headdim), NT (>= dstate), WARPS, STAGES; TF32, SEQUENCES, PACKED: as in ssd_forward.cu.
#include "ssd.cuh"

#define THREADS (WARPS * 32)
#define STRIPS (Q / 16)
#define PARTS (WARPS / STRIPS)
#define SHARE(tiles) (((tiles) + PARTS - 1) / PARTS)
#define PAIR_TILES SHARE(STRIPS)
#define P_TILES SHARE(PT / 16)
#define N_TILES SHARE(NT / 16)
#define X_STRIDE padded_stride<X>(PT)
#define N_STRIDE padded_stride<X>(NT)
#define SCORE_STRIDE padded_stride<X>(Q)
#define X_TILE (Q * X_STRIDE)
#define N_TILE (Q * N_STRIDE)
#define STATE_TILE (PT * N_STRIDE)
#define STAGE (2 * X_TILE + 2 * STATE_TILE)
#define SCALARS (4 * Q + 4)
#define SUMS ((2 * STRIPS + 2 * PARTS + 2) * Q + WARPS)
#define RUNS (SEQUENCES ? Q : 0)

static_assert(WARPS % STRIPS == 0, "shape");

struct SsdBackwardParameters {
    const void* x;
    const void* dout;
    const void* B;
    const void* C;
    const void* dt;
    const void* A;
    const void* dt_bias;
    const void* D;
    const void* states;   // (batch, chunks, heads, headdim, dstate)
    const void* dstates;
    const void* seq_idx;
    void* dx;
    void* dB;        // (batch, seqlen, groups, dstate) of X; with splits (splits, batch, seqlen, groups, dstate) of float
    void* dC;
    float* ddt;      // (batch, heads, seqlen)
    float* dA_parts;  // (batch, chunks, heads)
    float* dD_parts;  // the same, for D a head; or null
    long long x_stride[4];  // batch, step, head, column
    long long dout_stride[4];
    long long B_stride[4];  // batch, step, group, state
    long long C_stride[4];
    long long dt_stride[3];
    long long dx_stride[3];  // batch, step, head
    long long D_stride[2];
    long long seq_stride[2];
    long long A_stride, bias_stride;
    int dt_type, A_type, bias_type, D_type, seq_wide;
    int batches, heads, groups, group_heads, splits, split_heads, headdim, dstate, seqlen, softplus;
    float dt_min, dt_max;
};

extern "C" __global__ void __launch_bounds__(THREADS) ssd_backward(const SsdBackwardParameters p) {
    DYNAMIC_SHARED(shared_memory);
    X* const stages = reinterpret_cast<X*>(shared_memory);
    X* const B_tile = stages + STAGES * STAGE;
    X* const C_tile = B_tile + N_TILE;
    X* const scores = C_tile + N_TILE;  // d L T of a head; at the end the sum of d L M
    float* const scalars = reinterpret_cast<float*>(scores + Q * SCORE_STRIDE);
    float* const sums = scalars + 3 * SCALARS;
    int* const runs = reinterpret_cast<int*>(sums + 2 * SUMS);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int strip = warp / PARTS, part = warp % PARTS, first_row = strip * 16;
    // blockIdx.x = (batch, chunk, group, split)
    const int chunks = (p.seqlen + Q - 1) / Q;
    const int split = blockIdx.x % p.splits, group = blockIdx.x / p.splits % p.groups;
    const int chunk = blockIdx.x / p.splits / p.groups % chunks, batch = blockIdx.x / p.splits / p.groups / chunks;
    const int start = chunk * Q, stop = min(start + Q, p.seqlen);
    const int begin = split * p.split_heads, count = min(p.split_heads, p.group_heads - begin);
    const int first_head = group * p.group_heads + begin;

    const X* const B = static_cast<const X*>(p.B) + batch * p.B_stride[0] + group * p.B_stride[2];
    const X* const C = static_cast<const X*>(p.C) + batch * p.C_stride[0] + group * p.C_stride[2];
    fetch_tile<Q, NT, N_STRIDE, THREADS, PACKED>(threadIdx.x, B_tile, B, p.B_stride[1], p.B_stride[3], start, stop, p.dstate);
    fetch_tile<Q, NT, N_STRIDE, THREADS, PACKED>(threadIdx.x, C_tile, C, p.C_stride[1], p.C_stride[3], start, stop, p.dstate);
    const auto fetch = [&](X* stage, int head) {
        const X* const x = static_cast<const X*>(p.x) + batch * p.x_stride[0] + head * p.x_stride[2];
        const X* const dout = static_cast<const X*>(p.dout) + batch * p.dout_stride[0] + head * p.dout_stride[2];
        const i64 bound = (((i64)batch * chunks + chunk) * p.heads + head) * p.headdim * p.dstate;
        fetch_tile<Q, PT, X_STRIDE, THREADS, PACKED>(
            threadIdx.x, stage, x, p.x_stride[1], p.x_stride[3], start, stop, p.headdim);
        fetch_tile<Q, PT, X_STRIDE, THREADS, PACKED>(
            threadIdx.x, stage + X_TILE, dout, p.dout_stride[1], p.dout_stride[3], start, stop, p.headdim);
        fetch_tile<PT, NT, N_STRIDE, THREADS, PACKED>(
            threadIdx.x, stage + 2 * X_TILE, static_cast<const X*>(p.states) + bound, p.dstate, 1, 0, p.headdim, p.dstate);
        fetch_tile<PT, NT, N_STRIDE, THREADS, PACKED>(
            threadIdx.x, stage + 2 * X_TILE + STATE_TILE, static_cast<const X*>(p.dstates) + bound, p.dstate, 1, 0, p.headdim,
            p.dstate);
        commit_copies();
    };
    const auto steps_of = [&](int head) {
        Steps steps;
        steps.dt = p.dt;
        steps.at = batch * p.dt_stride[0] + head * p.dt_stride[2];
        steps.stride = p.dt_stride[1];
        steps.type = p.dt_type;
        steps.bias = p.dt_bias ? load_any(p.dt_bias, p.bias_type, head * p.bias_stride) : 0.0f;
        steps.A = load_any(p.A, p.A_type, head * p.A_stride);
        steps.softplus = p.softplus;
        steps.low = p.dt_min;
        steps.high = p.dt_max;
        return steps;
    };
    constexpr int EACH = (Q + 31) / 32;
    const auto place = [&](int number) {  // the scalars of head `number` of this block
        const Steps steps = steps_of(first_head + number);
        float raw[EACH];
        int changes[EACH];
        steps.load<Q>(start, stop, raw);
        load_changes<Q, SEQUENCES>(p.seq_idx, p.seq_wide, batch * p.seq_stride[0], p.seq_stride[1], start, stop, changes);
        float* const here = scalars + number % 3 * SCALARS;
        place_scalars<Q, sizeof(X) == 4, SEQUENCES>(
            steps, raw, changes, stop - start, here, here + 2 * Q, here + 3 * Q, runs + number % 3 * RUNS);
    };

    // The scalars' gradients of one head, by one warp: lane i has EACH neighbouring steps.
    const auto finish = [&](int number) {
        const int head = first_head + number;
        const float* const sizes = scalars + number % 3 * SCALARS;
        const float* const pair_rows = sums + (number & 1) * SUMS;  // [strip of j][i]: sums over j < i of d K
        const float* const pair_columns = pair_rows + STRIPS * Q;   // [strip of i][j]: sums over i > j of K
        const float* const row_parts = pair_columns + STRIPS * Q;   // [part][i]: e C (S^T G)
        const float* const column_parts = row_parts + PARTS * Q;    // [part][j]: w X (B R^T)
        const float* const diagonal = column_parts + PARTS * Q;     // K, then M
        const Steps steps = steps_of(head);
        float raw[EACH], d[EACH], outputs[EACH], inputs[EACH], direct[EACH], skipped = 0.0f;
        steps.load<Q>(start, stop, raw);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int at = lane * EACH + e;
            float row = 0.0f, column = 0.0f, entering = 0.0f, leaving = 0.0f;
            d[e] = outputs[e] = inputs[e] = direct[e] = 0.0f;
            if (at < Q) {
                for (int s = 0; s <= at / 16; ++s) row += pair_rows[s * Q + at];
                for (int s = at / 16; s < STRIPS; ++s) column += pair_columns[s * Q + at];
                for (int s = 0; s < PARTS; ++s) {
                    entering += row_parts[s * Q + at];
                    leaving += column_parts[s * Q + at];
                }
                d[e] = sizes[2 * at + 1];
                outputs[e] = row - d[e] * column + entering;
                inputs[e] = d[e] * leaving;
                direct[e] = column + diagonal[at] + leaving;
                skipped += diagonal[Q + at];
            }
        }
        float met = lane < WARPS ? diagonal[2 * Q + lane] : 0.0f;
#pragma unroll
        for (int by = 16; by; by /= 2) {
            met += __shfl_xor_sync(ALL_LANES, met, by);
            skipped += __shfl_xor_sync(ALL_LANES, skipped, by);
        }
        float after = 0.0f, before = 0.0f;  // sums of the lane's own steps, then of all lanes behind (before) it
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            after += outputs[e];
            before += inputs[e];
        }
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const float from_after = __shfl_down_sync(ALL_LANES, after, by), from_before = __shfl_up_sync(ALL_LANES, before, by);
            if (lane + by < 32) after += from_after;
            if (lane >= by) before += from_before;
        }
        after = __shfl_down_sync(ALL_LANES, after, 1);
        before = __shfl_up_sync(ALL_LANES, before, 1);
        if (lane == 31) after = 0.0f;
        if (lane == 0) before = 0.0f;
        const float through = sizes[3 * Q + Q] * met;  // the entering state through the whole chunk
        float exponent[EACH], dA = 0.0f;
#pragma unroll
        for (int e = EACH - 1; e >= 0; --e) {
            after += outputs[e];
            exponent[e] = after;
        }
        float* const ddt = p.ddt + ((i64)batch * p.heads + head) * p.seqlen + start;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int at = lane * EACH + e;
            const float found = exponent[e] + before + through;
            before += inputs[e];
            dA = fmaf(found, d[e], dA);
            const float sum = raw[e] + steps.bias, size = p.softplus ? softplus(sum) : sum;
            float slope = p.softplus ? softplus_derivative(sum) : 1.0f;
            if (size < p.dt_min || size > p.dt_max) slope = 0.0f;
            if (at < Q && start + at < stop) ddt[at] = fmaf(steps.A, found, direct[e]) * slope;
        }
#pragma unroll
        for (int by = 16; by; by /= 2) dA += __shfl_xor_sync(ALL_LANES, dA, by);
        if (lane == 0) {
            const i64 at = ((i64)batch * chunks + chunk) * p.heads + head;
            p.dA_parts[at] = dA;
            if (p.dD_parts) p.dD_parts[at] = skipped;
        }
    };

    float dB[N_TILES][2][4], dC[N_TILES][2][4], pairs[PAIR_TILES][2][4], T[PAIR_TILES][2][4];
#pragma unroll
    for (int j = 0; j < N_TILES; ++j) {
        clear(dB[j]);
        clear(dC[j]);
    }
#pragma unroll
    for (int j = 0; j < PAIR_TILES; ++j) {
        clear(pairs[j]);
        clear(T[j]);
    }
    fetch(stages, first_head);
    if (warp == 0) place(0);

    const unsigned B_rows = shared_address(B_tile + first_row * N_STRIDE) + rows_offset<X>(N_STRIDE);
    for (int number = 0; number < count; ++number) {
        const bool more = number + 1 < count;
        wait_copies<0>();
        __syncthreads();
        X* const stage = stages + (STAGES == 2 ? number & 1 : 0) * STAGE;
        if (STAGES == 2 && more) fetch(stages + ((number & 1) ^ 1) * STAGE, first_head + number + 1);
        if (more && warp == (number + 1) % WARPS) place(number + 1);
        if (number && warp == (number + WARPS / 2) % WARPS) finish(number - 1);
        if (number == 0) {
#pragma unroll
            for (int j = 0; j < PAIR_TILES; ++j) {
                const int tile = part + j * PARTS;
                if (tile < strip || tile >= STRIPS) continue;
                const unsigned C_rows = shared_address(C_tile + tile * 16 * N_STRIDE) + right_rows_offset<X>(N_STRIDE);
#pragma unroll 2
                for (int k = 0; k < NT / 16; ++k)
                    multiply_add<TF32>(
                        T[j], load_rows<X, N_STRIDE>(B_rows + k * 16 * sizeof(X)),
                        load_right_rows<X, N_STRIDE>(C_rows + k * 16 * sizeof(X)));
            }
        }
        const X* const x_tile = stage;
        const X* const G_tile = stage + X_TILE;
        const X* const S_tile = G_tile + X_TILE;
        const X* const R_tile = S_tile + STATE_TILE;
        const float* const sizes = scalars + number % 3 * SCALARS;
        const float* const rest = sizes + 2 * Q;
        const float* const leaving = sizes + 3 * Q;
        const int* const run = runs + number % 3 * RUNS;
        float* const pair_rows = sums + (number & 1) * SUMS;
        float* const pair_columns = pair_rows + STRIPS * Q;
        float* const row_parts = pair_columns + STRIPS * Q;
        float* const column_parts = row_parts + PARTS * Q;
        float* const diagonal = column_parts + PARTS * Q;

        // The lane's two rows, as steps of inputs (j) and of outputs (i).
        float row_cs[2], row_rest[2], row_d[2], row_w[2], row_e[2];
        int row_run[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int at = first_row + r * 8 + g;
            row_cs[r] = sizes[2 * at];
            row_d[r] = sizes[2 * at + 1];
            row_rest[r] = sizeof(X) == 4 ? rest[at] : 0.0f;
            row_run[r] = SEQUENCES ? run[at] : 0;
            const bool stays = !SEQUENCES || row_run[r] == run[Q - 1];
            const float left = sizes[2 * (Q - 1)] - row_cs[r] + (sizeof(X) == 4 ? rest[Q - 1] - row_rest[r] : 0.0f);
            row_w[r] = stays ? fast_exp2(left) : 0.0f;
            row_e[r] = row_run[r] ? 0.0f : fast_exp2(row_cs[r] + row_rest[r]);
        }

        // --- M, K; d L T for dX, the sum of d L M for dB and dC
        Fragment<X> left[PT / 16];
        const unsigned x_rows = shared_address(x_tile + first_row * X_STRIDE) + rows_offset<X>(X_STRIDE);
#pragma unroll
        for (int k = 0; k < PT / 16; ++k) left[k] = load_rows<X, X_STRIDE>(x_rows + k * 16 * sizeof(X));
#pragma unroll
        for (int j = 0; j < PAIR_TILES; ++j) {
            const int tile = part + j * PARTS;
            if (tile < strip || tile >= STRIPS) continue;
            float M[2][4];
            clear(M);
            const unsigned G_rows = shared_address(G_tile + tile * 16 * X_STRIDE) + right_rows_offset<X>(X_STRIDE);
#pragma unroll
            for (int k = 0; k < PT / 16; ++k)
                multiply_add<TF32>(M, left[k], load_right_rows<X, X_STRIDE>(G_rows + k * 16 * sizeof(X)));
            float of_rows[2] = {0.0f, 0.0f};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int first = tile * 16 + half * 8 + 2 * t;
                const Pack<float, 4> two = load_pack<float, 4>(sizes + 2 * first);
                float of_columns[2] = {0.0f, 0.0f}, score[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int r = i / 2, row = first_row + r * 8 + g, column = first + i % 2;
                    float by = two.at[i % 2 * 2] - row_cs[r];
                    if (sizeof(X) == 4) by += rest[column] - row_rest[r];
                    const bool reaches = column >= row && !(SEQUENCES && run[column] != row_run[r]);
                    const float decay = reaches ? fast_exp2(by) : 0.0f, decayed = decay * T[j][half][i];
                    const float K = decayed * M[half][i];
                    if (column != row) {
                        of_rows[r] += K;
                        of_columns[i % 2] = fmaf(row_d[r], K, of_columns[i % 2]);
                    } else {
                        diagonal[row] = K;
                        diagonal[Q + row] = M[half][i];
                    }
                    score[i] = row_d[r] * decayed;
                    pairs[j][half][i] = fmaf(row_d[r] * decay, M[half][i], pairs[j][half][i]);
                }
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    Pack<X, 2> pack;
                    const float both[2] = {score[2 * r], score[2 * r + 1]};
                    from_floats(pack, both);
                    store_pack<X, 2>(scores + (first_row + r * 8 + g) * SCORE_STRIDE + first, pack);
                }
#pragma unroll
                for (int e = 0; e < 2; ++e) {
#pragma unroll
                    for (int by = 4; by < 32; by *= 2) of_columns[e] += __shfl_xor_sync(ALL_LANES, of_columns[e], by);
                    if (g == 0) pair_rows[strip * Q + first + e] = of_columns[e];
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                of_rows[r] += __shfl_xor_sync(ALL_LANES, of_rows[r], 1);
                of_rows[r] += __shfl_xor_sync(ALL_LANES, of_rows[r], 2);
                if (t == 0) pair_columns[tile * Q + first_row + r * 8 + g] = of_rows[r];
            }
        }

        // --- dB of the states: rows of x times R
#pragma unroll
        for (int j = 0; j < N_TILES; ++j) {
            const int tile = part + j * PARTS;
            if (tile >= NT / 16) continue;
            float product[2][4];
            clear(product);
            const unsigned R_columns = shared_address(R_tile + tile * 16) + right_columns_offset<X>(N_STRIDE);
#pragma unroll
            for (int k = 0; k < PT / 16; ++k)
                multiply_add<TF32>(product, left[k], load_right_columns<X, N_STRIDE>(R_columns + k * 16 * N_STRIDE * sizeof(X)));
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    dB[j][half][i] = fmaf(row_d[i / 2] * row_w[i / 2], product[half][i], dB[j][half][i]);
        }

        // --- dC of the states: rows of G times S
        const unsigned G_rows = shared_address(G_tile + first_row * X_STRIDE) + rows_offset<X>(X_STRIDE);
#pragma unroll
        for (int k = 0; k < PT / 16; ++k) left[k] = load_rows<X, X_STRIDE>(G_rows + k * 16 * sizeof(X));
        float of_outputs[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < N_TILES; ++j) {
            const int tile = part + j * PARTS;
            if (tile >= NT / 16) continue;
            float product[2][4];
            clear(product);
            const unsigned S_columns = shared_address(S_tile + tile * 16) + right_columns_offset<X>(N_STRIDE);
#pragma unroll
            for (int k = 0; k < PT / 16; ++k)
                multiply_add<TF32>(product, left[k], load_right_columns<X, N_STRIDE>(S_columns + k * 16 * N_STRIDE * sizeof(X)));
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float own[2];
                    to_floats(
                        own, load_pack<X, 2>(C_tile + (first_row + r * 8 + g) * N_STRIDE + tile * 16 + half * 8 + 2 * t));
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float scaled = row_e[r] * product[half][2 * r + e];
                        of_outputs[r] = fmaf(own[e], scaled, of_outputs[r]);
                        dC[j][half][2 * r + e] += scaled;
                    }
                }
        }

        // --- dX: B R^T, then the chunk's own part
        float dx[P_TILES][2][4], of_inputs[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < P_TILES; ++j) clear(dx[j]);
        if (part < PT / 16) {
#pragma unroll 2
            for (int k = 0; k < NT / 16; ++k) {
                const Fragment<X> b = load_rows<X, N_STRIDE>(B_rows + k * 16 * sizeof(X));
#pragma unroll
                for (int j = 0; j < P_TILES; ++j) {
                    const int tile = part + j * PARTS;
                    if (tile >= PT / 16) continue;
                    const unsigned R_rows = shared_address(R_tile + tile * 16 * N_STRIDE) + right_rows_offset<X>(N_STRIDE);
                    multiply_add<TF32>(dx[j], b, load_right_rows<X, N_STRIDE>(R_rows + k * 16 * sizeof(X)));
                }
            }
#pragma unroll
            for (int j = 0; j < P_TILES; ++j) {
                const int tile = part + j * PARTS;
                if (tile >= PT / 16) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float own[2];
                        to_floats(
                            own, load_pack<X, 2>(x_tile + (first_row + r * 8 + g) * X_STRIDE + tile * 16 + half * 8 + 2 * t));
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            float& sum = dx[j][half][2 * r + e];
                            sum *= row_w[r];
                            of_inputs[r] = fmaf(own[e], sum, of_inputs[r]);
                            sum *= row_d[r];
                        }
                    }
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int by = 1; by < 4; by *= 2) {
                of_outputs[r] += __shfl_xor_sync(ALL_LANES, of_outputs[r], by);
                of_inputs[r] += __shfl_xor_sync(ALL_LANES, of_inputs[r], by);
            }
            if (t == 0) {
                row_parts[part * Q + first_row + r * 8 + g] = of_outputs[r];
                column_parts[part * Q + first_row + r * 8 + g] = of_inputs[r];
            }
        }
        float met = 0.0f;  // <R, S>
        constexpr int VECTOR = 16 / sizeof(X);
        for (int vector = threadIdx.x; vector < PT * NT / VECTOR; vector += THREADS) {
            const int at = vector / (NT / VECTOR) * N_STRIDE + vector % (NT / VECTOR) * VECTOR;
            float s[VECTOR], r[VECTOR];
            to_floats(s, load_pack<X, VECTOR>(S_tile + at));
            to_floats(r, load_pack<X, VECTOR>(R_tile + at));
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) met = fmaf(s[e], r[e], met);
        }
#pragma unroll
        for (int by = 16; by; by /= 2) met += __shfl_xor_sync(ALL_LANES, met, by);
        if (lane == 0) diagonal[2 * Q + warp] = met;

        barrier_of<PARTS * 32>(1 + strip);  // the strip's scores are there
        const int head = first_head + number;
        const unsigned score_rows = shared_address(scores + first_row * SCORE_STRIDE) + rows_offset<X>(SCORE_STRIDE);
#pragma unroll
        for (int j = 0; j < P_TILES; ++j) {
            const int tile = part + j * PARTS;
            if (tile >= PT / 16) continue;
            const unsigned G_columns = shared_address(G_tile + tile * 16) + right_columns_offset<X>(X_STRIDE);
#pragma unroll
            for (int k = 0; k < STRIPS; ++k) {
                if (k < strip) continue;
                multiply_add<TF32>(
                    dx[j], load_rows<X, SCORE_STRIDE>(score_rows + k * 16 * sizeof(X)),
                    load_right_columns<X, X_STRIDE>(G_columns + k * 16 * X_STRIDE * sizeof(X)));
            }
            const bool odd = t & 1;
            const int lane_column = tile * 16 + (t & 1) * 8 + (t & ~1) * 2;  // lanes of a quad trade halves
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float* const low = dx[j][0] + 2 * r;
                const float* const high = dx[j][1] + 2 * r;
                const float got[2] = {
                    __shfl_xor_sync(ALL_LANES, odd ? low[0] : high[0], 1), __shfl_xor_sync(ALL_LANES, odd ? low[1] : high[1], 1)};
                float four[4] = {odd ? got[0] : low[0], odd ? got[1] : low[1], odd ? high[0] : got[0], odd ? high[1] : got[1]};
                const int row = first_row + r * 8 + g;
                if (p.D) {
                    float own[4];
                    to_floats(own, load_pack<X, 4>(G_tile + row * X_STRIDE + lane_column));
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (lane_column + e < p.headdim)
                            four[e] = fmaf(
                                load_any(p.D, p.D_type, head * p.D_stride[0] + (lane_column + e) * p.D_stride[1]), own[e], four[e]);
                }
                X* const to = static_cast<X*>(p.dx) + batch * p.dx_stride[0] + (start + row) * p.dx_stride[1] + head * p.dx_stride[2];
                store_four<X, PACKED>(to + lane_column, start + row < stop ? p.headdim - lane_column : 0, four);
            }
        }
        if (STAGES == 1 && more) {
            __syncthreads();
            fetch(stages, first_head + number + 1);
        }
    }

    // --- the chunk's own part of dB and dC, for all heads at once
    __syncthreads();
    if (warp == (count + WARPS / 2) % WARPS) finish(count - 1);
#pragma unroll
    for (int j = 0; j < PAIR_TILES; ++j) {
        const int tile = part + j * PARTS;
        if (tile < strip || tile >= STRIPS) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                Pack<X, 2> pack;
                const float both[2] = {pairs[j][half][2 * r], pairs[j][half][2 * r + 1]};
                from_floats(pack, both);
                store_pack<X, 2>(scores + (first_row + r * 8 + g) * SCORE_STRIDE + tile * 16 + half * 8 + 2 * t, pack);
            }
    }
    __syncthreads();
    const unsigned pair_rows = shared_address(scores + first_row * SCORE_STRIDE) + rows_offset<X>(SCORE_STRIDE);
    const unsigned pair_columns = shared_address(scores + first_row) + columns_offset<X>(SCORE_STRIDE);
#pragma unroll
    for (int j = 0; j < N_TILES; ++j) {
        const int tile = part + j * PARTS;
        if (tile >= NT / 16) continue;
        const unsigned B_columns = shared_address(B_tile + tile * 16) + right_columns_offset<X>(N_STRIDE);
        const unsigned C_columns = shared_address(C_tile + tile * 16) + right_columns_offset<X>(N_STRIDE);
#pragma unroll
        for (int k = 0; k < STRIPS; ++k) {
            if (k >= strip)
                multiply_add<TF32>(
                    dB[j], load_rows<X, SCORE_STRIDE>(pair_rows + k * 16 * sizeof(X)),
                    load_right_columns<X, N_STRIDE>(C_columns + k * 16 * N_STRIDE * sizeof(X)));
            if (k <= strip)
                multiply_add<TF32>(
                    dC[j], load_columns<X, SCORE_STRIDE>(pair_columns + k * 16 * SCORE_STRIDE * sizeof(X)),
                    load_right_columns<X, N_STRIDE>(B_columns + k * 16 * N_STRIDE * sizeof(X)));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int step = start + first_row + r * 8 + g, n = tile * 16 + half * 8 + 2 * t;
                if (step >= stop) continue;
                const i64 at = (((i64)(p.splits > 1 ? split * p.batches : 0) + batch) * p.seqlen + step) * p.groups + group;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (n + e >= p.dstate) continue;
                    if (p.splits > 1) {
                        static_cast<float*>(p.dB)[at * p.dstate + n + e] = dB[j][half][2 * r + e];
                        static_cast<float*>(p.dC)[at * p.dstate + n + e] = dC[j][half][2 * r + e];
                    } else {
                        static_cast<X*>(p.dB)[at * p.dstate + n + e] = from_float<X>(dB[j][half][2 * r + e]);
                        static_cast<X*>(p.dC)[at * p.dstate + n + e] = from_float<X>(dC[j][half][2 * r + e]);
                    }
                }
            }
    }
}
