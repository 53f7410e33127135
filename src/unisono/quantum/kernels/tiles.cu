// The programs of kernels/code.py on a GPU: one block of threads has a tile of amplitudes in shared memory at a time.
//
// Rows are single amplitudes here, so there are no lanes. gpu.py puts the names of code.py's fields before this text, and
// what `real`, `amplitude`, THREADS, EACH and BLOCKS are.
//
// Lists of rows hold the elements of an affine space in order, so row i ^ j of a list, for i and j without common bits,
// is rows[i] ^ rows[j] ^ rows[0]: a thread reads one entry of its own, and one in common with all threads for each turn
// of its loop. The same holds of places.

#define WARPS (THREADS / 32)
// EACH: amplitudes a thread has in registers where it needs them twice

struct Program {
    const int *ops, *rows;
    const long long *pairs, *places;
    const amplitude *phases, *matrices, *halves;  // halves: cosine and sine of half of each turn's angle
};

extern __shared__ __align__(16) unsigned char shared[];

__device__ __forceinline__ int odd(long long word) { return __popcll(word) & 1; }

__device__ __forceinline__ amplitude times(amplitude a, amplitude b) {
    return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x};
}

__device__ __forceinline__ void add_product(amplitude &sum, amplitude a, amplitude b) {
    sum.x += a.x * b.x - a.y * b.y;
    sum.y += a.x * b.y + a.y * b.x;
}

// The shift of rows that the outside bits ask for.
__device__ int flipped(const long long *pairs, int begin, int count, long long outside) {
    if (!count) return 0;
    int shift = 0;
    for (int i = begin; i < begin + count; ++i) shift ^= odd(pairs[2 * i] & outside) ? (int)pairs[2 * i + 1] : 0;
    return shift;
}

__device__ bool holds(const long long *pairs, int begin, int count, long long outside) {
    for (int i = begin; i < begin + count; ++i)
        if (odd(pairs[2 * i] & outside) != (int)pairs[2 * i + 1]) return false;
    return true;
}

__device__ long long start_of(const int *sweep, const long long *places, long long number) {
    long long start = 0;
    for (int bit = 0; bit < sweep[OUTSIDE_BITS]; ++bit)
        if (number >> bit & 1) start += places[sweep[OUTSIDE] + bit];
    return start;
}

__device__ __forceinline__ void fetch(amplitude *to, const amplitude *from) {
#if __CUDA_ARCH__ >= 800
    unsigned address = (unsigned)__cvta_generic_to_shared(to);
    if (sizeof(amplitude) == 8)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(from));
    else
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
#else
    *to = *from;
#endif
}

__device__ __forceinline__ void fetched() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Place i of a tile becomes row rows[order + i] ^ shift.
__device__ void gather(const amplitude *state, const int *sweep, const Program &p, int order, int shift, amplitude *tile) {
    int count = 1 << sweep[ROW_BITS];
    const long long *places = p.places + sweep[PLACES];
    const int *rows = p.rows + order;
    if ((int)threadIdx.x >= count) return;
    const amplitude *from = state + places[threadIdx.x];
    int row = rows[threadIdx.x] ^ shift;
#pragma unroll 8
    for (int i = 0; i < count; i += THREADS) fetch(tile + (row ^ rows[i]), from + places[i]);
}

__device__ void scatter(amplitude *state, const int *sweep, const Program &p, int order, int shift, const amplitude *tile) {
    int count = 1 << sweep[ROW_BITS];
    const long long *places = p.places + sweep[PLACES];
    const int *rows = p.rows + order;
    if ((int)threadIdx.x >= count) return;
    amplitude *to = state + places[threadIdx.x];
    int row = rows[threadIdx.x] ^ shift;
#pragma unroll 8
    for (int i = 0; i < count; i += THREADS) to[places[i]] = tile[row ^ rows[i]];
}

__device__ __forceinline__ void turn(amplitude &a, amplitude &b, amplitude half) {
    amplitude old = a;
    a.x = half.x * a.x - half.y * b.x;
    a.y = half.x * a.y - half.y * b.y;
    b.x = half.x * b.x + half.y * old.x;
    b.y = half.x * b.y + half.y * old.y;
}

// BITS bits turned in one pass: 2^BITS rows in registers.
template <int BITS>
__device__ void turns(amplitude *tile, const int *op, const Program &p, int shift) {
    int count = op[ROW_COUNT];
    const int *rows = p.rows + op[ROWS];
    if ((int)threadIdx.x >= count) return;
    int masks[BITS];
    amplitude half[BITS];
#pragma unroll
    for (int bit = 0; bit < BITS; ++bit) masks[bit] = op[MASK0 + bit], half[bit] = p.halves[op[SLOT] + bit];
    int base = rows[threadIdx.x] ^ rows[0] ^ shift;
    for (int i = 0; i < count; i += THREADS) {
        int row = base ^ rows[i];
        amplitude a[1 << BITS];
#pragma unroll
        for (int j = 0; j < 1 << BITS; ++j) {
            int at = row;
#pragma unroll
            for (int bit = 0; bit < BITS; ++bit) at ^= j >> bit & 1 ? masks[bit] : 0;
            a[j] = tile[at];
        }
#pragma unroll
        for (int bit = 0; bit < BITS; ++bit)
#pragma unroll
            for (int j = 0; j < 1 << BITS; ++j)
                if (!(j >> bit & 1)) turn(a[j], a[j | 1 << bit], half[bit]);
#pragma unroll
        for (int j = 0; j < 1 << BITS; ++j) {
            int at = row;
#pragma unroll
            for (int bit = 0; bit < BITS; ++bit) at ^= j >> bit & 1 ? masks[bit] : 0;
            tile[at] = a[j];
        }
    }
}

__device__ void phase(amplitude *tile, const int *op, const Program &p, int count, int shift) {
    const amplitude *values = p.phases + op[VALUES];
#pragma unroll 4
    for (int row = threadIdx.x; row < count; row += THREADS) tile[row] = times(tile[row], values[row ^ shift]);
}

__device__ __forceinline__ amplitude entry(const amplitude *matrix, int size, int row, int column, bool adjoint) {
    if (!adjoint) return matrix[row * size + column];
    amplitude found = matrix[column * size + row];
    return {found.x, -found.y};
}

// A complex matrix on chosen rows; the masks of the rows that its index chooses stand before the rows. Each thread adds
// up EACH new amplitudes; when all threads have read, it writes them.
__device__ void dense(amplitude *tile, const int *op, const Program &p, int shift, bool adjoint) {
    int bits = op[COUNT], size = 1 << bits, all = op[ROW_COUNT] << bits;
    const int *rows = p.rows + op[ROWS], *masks = rows - size;
    const amplitude *matrix = p.matrices + op[VALUES];
    for (int first = 0; first < all; first += EACH * THREADS) {
        amplitude made[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            int item = first + k * THREADS + threadIdx.x;
            made[k] = {0, 0};
            if (item >= all) continue;
            int row = rows[item >> bits] ^ shift;
            for (int column = 0; column < size; ++column)
                add_product(made[k], entry(matrix, size, item & (size - 1), column, adjoint), tile[row ^ masks[column]]);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            int item = first + k * THREADS + threadIdx.x;
            if (item < all) tile[rows[item >> bits] ^ shift ^ masks[item & (size - 1)]] = made[k];
        }
        __syncthreads();
    }
}

// A matrix on two bits: four rows in registers.
__device__ void dense2(amplitude *tile, const int *op, const Program &p, int shift, bool adjoint) {
    int count = op[ROW_COUNT];
    const int *rows = p.rows + op[ROWS], *masks = rows - 4;
    const amplitude *matrix = p.matrices + op[VALUES];
    for (int i = threadIdx.x; i < count; i += THREADS) {
        int row = rows[i] ^ shift;
        amplitude a[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = tile[row ^ masks[j]];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            amplitude sum = {0, 0};
#pragma unroll
            for (int k = 0; k < 4; ++k) add_product(sum, entry(matrix, 4, j, k, adjoint), a[k]);
            tile[row ^ masks[j]] = sum;
        }
    }
}

__device__ __forceinline__ void mix(amplitude *tile, const int *op, const Program &p, int shift, bool adjoint) {
    if (op[COUNT] == 2)
        dense2(tile, op, p, shift, adjoint);
    else
        dense(tile, op, p, shift, adjoint);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(
    amplitude *state, const int *sweeps, int number, const int *ops, const int *rows, const long long *pairs,
    const long long *places, const amplitude *phases, const amplitude *matrices, const amplitude *halves) {
    const int *sweep = sweeps + number * SWEEP_FIELDS;
    Program p = {ops, rows, pairs, places, phases, matrices, halves};
    amplitude *tile = (amplitude *)shared;
    int count = 1 << sweep[ROW_BITS];
    long long outside = (long long)blockIdx.x | ONE;
    amplitude *mine = state + start_of(sweep, places, blockIdx.x);
    gather(mine, sweep, p, 0, 0, tile);
    fetched();
    __syncthreads();
    for (int i = sweep[FIRST]; i < sweep[LAST]; ++i) {
        const int *op = ops + i * FIELDS;
        if (!holds(pairs, op[CONDITIONS], op[CONDITION_COUNT], outside)) continue;
        int shift = flipped(pairs, op[FLIPS], op[FLIP_COUNT], outside);
        if (op[KIND] == PHASE)
            phase(tile, op, p, count, shift);
        else if (op[KIND] == DENSE)
            mix(tile, op, p, shift, false);
        else if (op[COUNT] == 3)
            turns<3>(tile, op, p, shift);
        else if (op[COUNT] == 2)
            turns<2>(tile, op, p, shift);
        else
            turns<1>(tile, op, p, shift);
        __syncthreads();
    }
    scatter(mine, sweep, p, sweep[ORDER], flipped(pairs, sweep[SWEEP_FLIPS], sweep[SWEEP_FLIP_COUNT], outside), tile);
}

// ---- numbers for angles -----------------------------------------------------------------------------------------

// The entry of its table that a phase's record reads for a row; -1 where a guard fails.
__device__ int entry_of(const int *record, int row) {
    const int *parity = record + 6;
    for (int i = 0; i < record[4]; ++i, parity += 3)
        if (odd(parity[0] & row) ^ parity[2]) return -1;
    int index = 0;
    for (int i = 0; i < record[5]; ++i, parity += 3) index = index << 1 | (odd(parity[0] & row) ^ parity[2]);
    return index;
}

// Block i fills in the phase of instruction which[i].
extern "C" __global__ void __launch_bounds__(THREADS) bind(
    const int *ops, const int *which, const int *terms, const double *tables, amplitude *phases) {
    const int *op = ops + which[blockIdx.x] * FIELDS;
    for (int row = threadIdx.x; row < op[ROW_COUNT]; row += THREADS) {
        double angle = 0;
        const int *record = terms + op[ROWS];
        for (int i = 0; i < op[COUNT]; ++i, record += record[0]) {
            int index = entry_of(record, row);
            if (index >= 0) angle += tables[record[1] + index];
        }
        double sine, cosine;
        sincos(angle, &sine, &cosine);
        phases[op[VALUES] + row] = {(real)cosine, (real)sine};
    }
}

// ---- gradients --------------------------------------------------------------------------------------------------

// The program backwards on a state and its co-state. Each warp adds its share of every angle's gradient to places of its
// own, tile after tile in a fixed order, so that the sum does not depend on which warp came first.

__device__ __forceinline__ void contribute(double *share, real value) {
#pragma unroll
    for (int far = 16; far; far >>= 1) value += __shfl_xor_sync(0xffffffffu, value, far);
    if (threadIdx.x % 32 == 0) *share += (double)value;
}

template <int BITS>
__device__ void turns_back(amplitude *psi, amplitude *lam, const int *op, const Program &p, int shift, double *share) {
    int count = op[ROW_COUNT];
    const int *rows = p.rows + op[ROWS];
    real found[BITS];
#pragma unroll
    for (int bit = 0; bit < BITS; ++bit) found[bit] = 0;
    if ((int)threadIdx.x < count) {
        int base = rows[threadIdx.x] ^ rows[0] ^ shift;
        for (int i = 0; i < count; i += THREADS) {
            amplitude x[1 << BITS], y[1 << BITS];
            int row = base ^ rows[i];
#pragma unroll
            for (int j = 0; j < 1 << BITS; ++j) {
                int at = row;
#pragma unroll
                for (int bit = 0; bit < BITS; ++bit) at ^= j >> bit & 1 ? op[MASK0 + bit] : 0;
                x[j] = psi[at], y[j] = lam[at];
            }
#pragma unroll
            for (int bit = 0; bit < BITS; ++bit) {
                amplitude half = p.halves[op[SLOT] + bit];
                half.y = -half.y;
#pragma unroll
                for (int j = 0; j < 1 << BITS; ++j) {
                    if (j >> bit & 1) continue;
                    const int k = j | 1 << bit;
                    found[bit] += y[k].x * x[j].x + y[k].y * x[j].y - y[j].x * x[k].x - y[j].y * x[k].y;
                    turn(x[j], x[k], half);
                    turn(y[j], y[k], half);
                }
            }
#pragma unroll
            for (int j = 0; j < 1 << BITS; ++j) {
                int at = row;
#pragma unroll
                for (int bit = 0; bit < BITS; ++bit) at ^= j >> bit & 1 ? op[MASK0 + bit] : 0;
                psi[at] = x[j], lam[at] = y[j];
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int bit = 0; bit < BITS; ++bit) contribute(share + op[SLOT] + bit, found[bit]);
}

// What the record's angle gets from the rows (threadIdx.x + i THREADS) ^ shift, i from `first`, with weights `sums`.
__device__ real record_gradient(const int *record, const double *slopes, const real *sums, int first, int shift) {
    real total = 0;
    if (record[4] == 0 && record[5] == 1) {
        int mask = record[6], mine = odd(mask & (threadIdx.x ^ shift)) ^ record[8];
        real plain = 0, signs = 0;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            plain += sums[k];
            signs += odd(mask & (first + k * THREADS)) ? -sums[k] : sums[k];
        }
        real low = (real)slopes[record[1]], high = (real)slopes[record[1] + 1];
        return (low + high) / 2 * plain + (mine ? high - low : low - high) / 2 * signs;
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        int index = entry_of(record, (first + k * THREADS + threadIdx.x) ^ shift);
        if (index >= 0) total += (real)slopes[record[1] + index] * sums[k];
    }
    return total;
}

__device__ void phase_back(
    amplitude *psi, amplitude *lam, const int *op, const Program &p, int count, int shift, const int *terms,
    const double *slopes, double *share) {
    const amplitude *values = p.phases + op[VALUES];
    for (int first = 0; first < count; first += EACH * THREADS) {
        real sums[EACH];
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            int row = first + k * THREADS + threadIdx.x;
            sums[k] = 0;
            if (row >= count) continue;
            amplitude x = psi[row], y = lam[row], back = values[row ^ shift];
            sums[k] = y.x * x.y - y.y * x.x;
            back.y = -back.y;
            psi[row] = times(x, back), lam[row] = times(y, back);
        }
        if (op[SLOT] < 0) continue;
        __syncwarp();
        const int *record = terms + op[ROWS];
        for (int i = 0; i < op[COUNT]; ++i, record += record[0])
            if (record[3]) contribute(share + record[2], -2 * record_gradient(record, slopes, sums, first, shift));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_BACK) reverse(
    amplitude *state, amplitude *costate, const int *sweeps, int number, const int *ops, const int *rows,
    const long long *pairs, const long long *places, const amplitude *phases, const amplitude *matrices,
    const amplitude *halves, const int *terms, const double *slopes, double *shares, int angles, int turned) {
    const int *sweep = sweeps + number * SWEEP_FIELDS;
    Program p = {ops, rows, pairs, places, phases, matrices, halves};
    int count = 1 << sweep[ROW_BITS];
    amplitude *psi = (amplitude *)shared, *lam = psi + count;
    double *share = shares + (long long)(blockIdx.x * WARPS + threadIdx.x / 32) * angles;
    for (long long mine = blockIdx.x; mine < 1LL << sweep[OUTSIDE_BITS]; mine += gridDim.x) {
        long long outside = mine | ONE, start = start_of(sweep, places, mine);
        int turned_by = flipped(pairs, sweep[SWEEP_FLIPS], sweep[SWEEP_FLIP_COUNT], outside);
        gather(state + start, sweep, p, sweep[ORDER], turned_by, psi);
        gather(costate + start, sweep, p, sweep[ORDER], turned_by, lam);
        fetched();
        __syncthreads();
        for (int i = sweep[LAST] - 1; i >= sweep[FIRST]; --i) {
            const int *op = ops + i * FIELDS;
            if (!holds(pairs, op[CONDITIONS], op[CONDITION_COUNT], outside)) continue;
            int shift = flipped(pairs, op[FLIPS], op[FLIP_COUNT], outside);
            if (op[KIND] == PHASE) {
                phase_back(psi, lam, op, p, count, shift, terms, slopes, share + turned);
            } else if (op[KIND] == DENSE) {
                mix(psi, op, p, shift, true);
                mix(lam, op, p, shift, true);
            } else if (op[COUNT] == 3) {
                turns_back<3>(psi, lam, op, p, shift, share);
            } else if (op[COUNT] == 2) {
                turns_back<2>(psi, lam, op, p, shift, share);
            } else {
                turns_back<1>(psi, lam, op, p, shift, share);
            }
            __syncthreads();
        }
        scatter(state + start, sweep, p, 0, 0, psi);
        scatter(costate + start, sweep, p, 0, 0, lam);
        __syncthreads();
    }
}
