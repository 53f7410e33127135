// Programs of kernels/gpu_program.py on a GPU: one block of threads has a tile of amplitudes in shared memory.
//
// gpu.py puts the names of the programs' fields before this text, and what `real`, `amplitude`, `place` (an index of an
// amplitude), THREADS, TOGETHER, BLOCKS and BLOCKS_BACK are. It defines ONLY_ and the name of the kernel that it wants:
// each takes a second or two to compile.
//
// Lists of rows and places are linear: entry i ^ j, for i and j without common bits, is entry i ^ entry j ^ entry 0.

#define WARPS (THREADS / 32)
#define EACH (1 << TOGETHER)  // amplitudes that a thread has in registers
#define FULL (EACH * THREADS * (int)sizeof(amplitude))  // bytes of a full tile
#define HALF (FULL / 2)                                  // tiles begin at a multiple of it
#define ALL 0xffffffffu

struct Program {
    const int *ops, *rows;
    const long long *pairs;
    const place *places;
    const amplitude *phases, *matrices;
    const amplitude *halves;  // cosine and sine of half of each turn's angle
    const real *slopes;  // tangent or cotangent of the same
    const real *scales;  // of each sweep: the product of what its turns were divided by
};

struct __align__(16) Op {
    int field[OP_FIELDS];
    __device__ __forceinline__ int operator[](int name) const { return field[name]; }
};

extern __shared__ __align__(16) unsigned char shared[];

// Instruction i of a program, or of a sweep's in shared memory.
__device__ __forceinline__ Op op_at(const int *ops, int i) {
    Op op;
    const int4 *from = (const int4 *)(ops + i * OP_FIELDS);
#pragma unroll
    for (int k = 0; k < OP_FIELDS / 4; ++k) {
        int4 part = from[k];
        op.field[4 * k] = part.x, op.field[4 * k + 1] = part.y, op.field[4 * k + 2] = part.z, op.field[4 * k + 3] = part.w;
    }
    return op;
}

__device__ __forceinline__ int odd(long long word) { return __popcll(word) & 1; }

__device__ __forceinline__ amplitude times(amplitude a, amplitude b) {
    return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x};
}

__device__ __forceinline__ amplitude conjugate(amplitude a) { return {a.x, -a.y}; }

__device__ __forceinline__ void add_product(amplitude &sum, amplitude a, amplitude b) {
    sum.x += a.x * b.x - a.y * b.y;
    sum.y += a.x * b.y + a.y * b.x;
}

// Where the first tile begins, after some bytes of shared memory: its address, and the same as a pointer.
__device__ __forceinline__ unsigned tile_after(int bytes) {
    return ((unsigned)__cvta_generic_to_shared(shared) + bytes + HALF - 1) & ~(HALF - 1);
}

__device__ __forceinline__ amplitude *tile_at(unsigned address) {
    return (amplitude *)(shared + (address - (unsigned)__cvta_generic_to_shared(shared)));
}

// ---- outside bits: what is the same for all rows of a tile, found by one warp ------------------------------------

__device__ __forceinline__ unsigned warp_xor(unsigned word) {
#if __CUDA_ARCH__ >= 800
    return __reduce_xor_sync(ALL, word);
#else
    for (int far = 16; far; far >>= 1) word ^= __shfl_xor_sync(ALL, word, far);
    return word;
#endif
}

// The shift of rows that the outside bits ask for.
__device__ __forceinline__ int flipped(const long long *pairs, int begin, int count, long long outside) {
    if (!count) return 0;
    int shift = 0;
    for (int i = begin + threadIdx.x % 32; i < begin + count; i += 32)
        shift ^= odd(pairs[2 * i] & outside) ? (int)pairs[2 * i + 1] : 0;
    return (int)warp_xor((unsigned)shift);
}

__device__ __forceinline__ bool holds(const long long *pairs, int begin, int count, long long outside) {
    if (!count) return true;
    bool good = true;
    for (int i = begin + threadIdx.x % 32; i < begin + count; i += 32)
        good = good && odd(pairs[2 * i] & outside) == (int)pairs[2 * i + 1];
    return __all_sync(ALL, good);
}

__device__ __forceinline__ place start_of(const int *sweep, const Program &p, long long number) {
    int bit = threadIdx.x % 32;
    place mine = bit < sweep[OUTSIDE_BITS] && (number >> bit & 1) ? p.places[sweep[OUTSIDE] + bit] : 0;
    if (sizeof(place) == 4) return (place)warp_xor((unsigned)mine);
    return (place)((unsigned long long)warp_xor((unsigned)((unsigned long long)mine >> 32)) << 32 | warp_xor((unsigned)mine));
}

// A sweep's instructions in shared memory; and of each its shift, or -1 where a tile skips it.
__device__ void find_shifts(int *local, int *shifts, const Program &p, int first, int count, long long outside) {
    const int4 *from = (const int4 *)(p.ops + first * OP_FIELDS);
    for (int i = threadIdx.x; i < count * (OP_FIELDS / 4); i += THREADS) ((int4 *)local)[i] = from[i];
    for (int i = threadIdx.x / 32; i < count; i += WARPS) {
        const int *op = p.ops + (first + i) * OP_FIELDS;
        int shift = flipped(p.pairs, op[FLIPS], op[FLIP_COUNT], outside);
        bool good = holds(p.pairs, op[CONDITIONS], op[CONDITION_COUNT], outside);
        if (threadIdx.x % 32 == 0) shifts[i] = good ? shift : -1;
    }
}

// The product of a pass' factors of each register; and the signs that its swapped turns leave (see turns).
__device__ void find_factors(amplitude *factors, const int *shifts, const int *ops, int count, const Program &p, bool back) {
    int j = threadIdx.x % EACH;
    for (int i = threadIdx.x / EACH; i < count; i += THREADS / EACH) {
        const int *op = ops + i * OP_FIELDS;
        if (op[KIND] != TURNS || op[FACTORS] < 0) continue;
        int swapped = op[SWAPPED];
        amplitude product = {!back && odd(swapped & j) ? (real)-1 : (real)1, 0};
        for (int k = 1; k <= op[PHASE_COUNT]; ++k) {
            int values = op[k * OP_FIELDS + OF_REGISTERS], shift = shifts[i + k] >> THREAD_BITS;
            if (shifts[i + k] < 0 || values < 0) continue;
            product = times(product, p.phases[values + (j ^ shift ^ (back ? swapped : 0))]);
        }
        factors[op[FACTORS] * EACH + j] = product;
    }
}

// ---- tiles ------------------------------------------------------------------------------------------------------

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

// For each of a thread's places in a tile: call(index of the amplitude, row); place i is row rows[order + i] ^ shift. The
// places of a full tile go in the order of a Gray code, so that each differs from the one before by one mask.
template <typename Call>
__device__ __forceinline__ void each_place(
    place start, const int *sweep, const Program &p, int order, int shift, Call call) {
    int count = 1 << sweep[ROW_BITS];
    const place *places = p.places + sweep[PLACES];
    const int *rows = p.rows + order;
    if (count != EACH * THREADS) {
        for (int i = threadIdx.x; i < count; i += THREADS) call(start ^ places[i], rows[i] ^ shift);
        return;
    }
    place at = start ^ places[threadIdx.x], place_of[TOGETHER];
    int row = rows[threadIdx.x] ^ shift, row_of[TOGETHER];
#pragma unroll
    for (int bit = 0; bit < TOGETHER; ++bit) place_of[bit] = places[THREADS << bit], row_of[bit] = rows[THREADS << bit];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int bit = i & 1 || !i ? 0 : i & 2 ? 1 : i & 4 ? 2 : TOGETHER - 1;
        if (i) at ^= place_of[bit], row ^= row_of[bit];
        call(at, row);
    }
}

__device__ __forceinline__ void gather(
    const amplitude *state, place start, const int *sweep, const Program &p, int order, int shift, amplitude *tile) {
    each_place(start, sweep, p, order, shift, [&](place at, int row) { fetch(tile + row, state + at); });
}

__device__ __forceinline__ void scatter(
    amplitude *state, place start, const int *sweep, const Program &p, int order, int shift, const amplitude *tile,
    real scale) {
    each_place(start, sweep, p, order, shift, [&](place at, int row) {
        amplitude value = tile[row];
        state[at] = {scale * value.x, scale * value.y};
    });
}

// ---- instructions -----------------------------------------------------------------------------------------------

// A turn divided by its cosine is low - t high, high + t low with its tangent t: half of the products. Where the sine is
// larger, it is divided by that: with low and high swapped before, t is the cotangent, and low comes out with the other
// sign. The sweep multiplies by all that was divided out when it writes its tiles.
__device__ __forceinline__ void slope_turn(amplitude (&a)[EACH], int bit, real t) {
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        if (j >> bit & 1) continue;
        amplitude low = a[j], high = a[j | 1 << bit];
        a[j] = {low.x - t * high.x, low.y - t * high.y};
        a[j | 1 << bit] = {high.x + t * low.x, high.y + t * low.y};
    }
}

__device__ __forceinline__ void negate(amplitude (&a)[EACH], int bit, bool high) {
#pragma unroll
    for (int j = 0; j < EACH; ++j)
        if ((j >> bit & 1) == (int)high) a[j] = {-a[j].x, -a[j].y};
}

// This thread's row in a pass.
__device__ __forceinline__ int thread_row(const Program &p, const int *op) {
    return p.rows[op[ROWS] + (threadIdx.x & (op[ROW_COUNT] - 1))];
}

// Where the rows of a pass are in shared memory. A tile begins at a multiple of half of its size, so rows of its upper half
// are at addresses that differ by `upper` from those below, and addresses are linear in rows. `swap`: the difference of
// swapped bits.
struct Rows {
    unsigned first, low[4], high[EACH / 4], swap;
    __device__ __forceinline__ static unsigned bytes(int row, unsigned upper) {
        unsigned plain = (unsigned)row * (unsigned)sizeof(amplitude);
        return (plain & (HALF - 1)) ^ (plain & HALF ? upper : 0);
    }
    __device__ __forceinline__ Rows(unsigned tile, const Op &op, int row) {
        unsigned masks[TOGETHER], upper = tile ^ (tile + HALF);
        swap = 0;
#pragma unroll
        for (int bit = 0; bit < TOGETHER; ++bit) {
            masks[bit] = bytes(op[MASK0 + bit], upper);
            swap ^= op[SWAPPED] >> bit & 1 ? masks[bit] : 0;
        }
        first = tile ^ bytes(row, upper);
        low[0] = 0, low[1] = masks[0], low[2] = masks[1], low[3] = masks[0] ^ masks[1];
        high[0] = 0, high[1] = masks[2];
        if (TOGETHER == 4) high[EACH / 4 - 2] = masks[TOGETHER - 1], high[EACH / 4 - 1] = masks[2] ^ masks[TOGETHER - 1];
    }
    __device__ __forceinline__ unsigned at(int j) const { return first ^ low[j & 3] ^ high[j >> 2]; }
};

// Loads and stores at addresses that are sums modulo 2 with nothing to be added; OFFSET is part of the instruction.
template <int OFFSET>
__device__ __forceinline__ float2 load(unsigned address, float) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2 + %3];" : "=f"(value.x), "=f"(value.y) : "r"(address), "n"(OFFSET) : "memory");
    return value;
}

template <int OFFSET>
__device__ __forceinline__ double2 load(unsigned address, double) {
    double2 value;
    asm volatile("ld.shared.v2.f64 {%0, %1}, [%2 + %3];" : "=d"(value.x), "=d"(value.y) : "r"(address), "n"(OFFSET) : "memory");
    return value;
}

template <int OFFSET>
__device__ __forceinline__ void store(unsigned address, float2 value) {
    asm volatile("st.shared.v2.f32 [%0 + %3], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y), "n"(OFFSET) : "memory");
}

template <int OFFSET>
__device__ __forceinline__ void store(unsigned address, double2 value) {
    asm volatile("st.shared.v2.f64 [%0 + %3], {%1, %2};" ::"r"(address), "d"(value.x), "d"(value.y), "n"(OFFSET) : "memory");
}

// Of a pass: the product of its factors of this thread.
__device__ __forceinline__ amplitude thread_factor(const Program &p, const int *ops, int count, const int *shifts) {
    amplitude product = {1, 0};
    for (int k = 1; k <= count; ++k) {
        int values = ops[k * OP_FIELDS + OF_THREADS], shift = shifts[k];
        if (shift >= 0 && values >= 0) product = times(product, p.phases[values + ((threadIdx.x ^ shift) & (THREADS - 1))]);
    }
    return product;
}

// For each of the tables of rows of a pass, and of those of registers where its factors have no slot: call(the table's
// value of register j, j).
template <typename Call>
__device__ __forceinline__ void each_table(
    const Program &p, const int *ops, const Op &op, const int *shifts, int swapped, Call call) {
    for (int k = 1; k <= op[PHASE_COUNT]; ++k) {
        const int *phase = ops + k * OP_FIELDS;
        if (shifts[k] < 0) continue;
        int shift = shifts[k] ^ swapped << THREAD_BITS;
        if (phase[OF_ROWS] >= 0) {
            const amplitude *table = p.phases + phase[OF_ROWS];
#pragma unroll
            for (int j = 0; j < EACH; ++j) call(__ldg(table + ((threadIdx.x | j << THREAD_BITS) ^ shift)), j);
        }
        if (op[FACTORS] == MORE_FACTORS && phase[OF_REGISTERS] >= 0) {
            const amplitude *table = p.phases + phase[OF_REGISTERS];
#pragma unroll
            for (int j = 0; j < EACH; ++j) call(__ldg(table + (j ^ shift >> THREAD_BITS)), j);
        }
    }
}

// Bits turned in one pass, and phases after them: EACH rows in registers. ops and shifts: from this instruction on.
__device__ __forceinline__ void turns(
    unsigned tile, const Program &p, const int *ops, const Op &op, const int *shifts, const amplitude *factors) {
    if ((int)threadIdx.x >= op[ROW_COUNT]) return;
    int swapped = op[SWAPPED];
    Rows rows(tile, op, thread_row(p, ops) ^ shifts[0]);
    amplitude a[EACH];
    rows.first ^= rows.swap;
#pragma unroll
    for (int j = 0; j < EACH; ++j) a[j] = load<0>(rows.at(j), (real)0);
    rows.first ^= rows.swap;
    if (op[COUNT] == TOGETHER) {
#pragma unroll
        for (int bit = 0; bit < TOGETHER; ++bit) slope_turn(a, bit, p.slopes[op[SLOT] + bit]);
    } else {
#pragma unroll
        for (int bit = 0; bit < TOGETHER - 1; ++bit)
            if (bit < op[COUNT]) slope_turn(a, bit, p.slopes[op[SLOT] + bit]);
    }
    if (op[FACTORS] < 0 && swapped) {
#pragma unroll
        for (int bit = 0; bit < TOGETHER; ++bit)
            if (swapped >> bit & 1) negate(a, bit, true);
    }
    if (op[PHASE_COUNT]) {
        amplitude mine = thread_factor(p, ops, op[PHASE_COUNT], shifts);
        if (op[FACTORS] >= 0) {
            const amplitude *factor = factors + op[FACTORS] * EACH;
#pragma unroll
            for (int j = 0; j < EACH; ++j) a[j] = times(a[j], times(mine, factor[j]));
        } else {
#pragma unroll
            for (int j = 0; j < EACH; ++j) a[j] = times(a[j], mine);
        }
        each_table(p, ops, op, shifts, 0, [&](amplitude value, int j) { a[j] = times(a[j], value); });
    }
#pragma unroll
    for (int j = 0; j < EACH; ++j) store<0>(rows.at(j), a[j]);
}

// A turn on the rows that its guards choose.
__device__ void guarded_turn(amplitude *tile, const int *op, const Program &p, int shift) {
    int count = op[ROW_COUNT], mask = op[MASK0];
    const int *rows = p.rows + op[ROWS];
    amplitude half = p.halves[op[SLOT]];
    for (int i = threadIdx.x; i < count; i += THREADS) {
        int row = rows[i] ^ shift;
        amplitude a = tile[row], b = tile[row ^ mask];
        tile[row] = {half.x * a.x - half.y * b.x, half.x * a.y - half.y * b.y};
        tile[row ^ mask] = {half.x * b.x + half.y * a.x, half.x * b.y + half.y * a.y};
    }
}

__device__ __forceinline__ amplitude entry(const amplitude *matrix, int size, int row, int column, bool adjoint) {
    return adjoint ? conjugate(matrix[column * size + row]) : matrix[row * size + column];
}

// A complex matrix on chosen rows; the masks of the rows that its index chooses stand before the rows. Each thread adds
// up some new amplitudes; when all threads have read, it writes them.
__device__ void dense(amplitude *tile, const int *op, const Program &p, int shift, bool adjoint) {
    int bits = op[COUNT], size = 1 << bits, all = op[ROW_COUNT] << bits;
    const int *rows = p.rows + op[ROWS], *masks = rows - size;
    const amplitude *matrix = p.matrices + op[VALUES];
    for (int first = 0; first < all; first += EACH / 2 * THREADS) {
        amplitude made[EACH / 2];
#pragma unroll
        for (int k = 0; k < EACH / 2; ++k) {
            int item = first + k * THREADS + threadIdx.x;
            made[k] = {0, 0};
            if (item >= all) continue;
            int row = rows[item >> bits] ^ shift;
            for (int column = 0; column < size; ++column)
                add_product(made[k], entry(matrix, size, item & (size - 1), column, adjoint), tile[row ^ masks[column]]);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < EACH / 2; ++k) {
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

__device__ __noinline__ void mix(amplitude *tile, const int *op, const Program &p, int shift, bool adjoint) {
    if (op[COUNT] == 2)
        dense2(tile, op, p, shift, adjoint);
    else
        dense(tile, op, p, shift, adjoint);
}

#ifdef ONLY_forward
// One tile a block. Instructions from `first` to `last` are those of the sweep; `room` bytes are before the tile.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(
    amplitude *state, const int *sweeps, int number, int first, int last, int room, int slots, const int *ops,
    const int *rows, const long long *pairs, const place *places, const amplitude *phases, const amplitude *matrices,
    const amplitude *halves, const real *slopes, const real *scales) {
    const int *sweep = sweeps + number * SWEEP_FIELDS;
    Program p = {ops, rows, pairs, places, phases, matrices, halves, slopes, scales};
    amplitude *factors = (amplitude *)shared;
    int *local = (int *)(factors + slots * EACH), *shifts = local + (last - first) * OP_FIELDS, *kept = shifts + (last - first);
    const unsigned at = tile_after(room);
    amplitude *tile = tile_at(at);
    long long outside = (long long)blockIdx.x | ONE;
    {
        place start = start_of(sweep, p, blockIdx.x);
        gather(state, start, sweep, p, sweep[START], 0, tile);
        find_shifts(local, shifts, p, first, last - first, outside);
        if (threadIdx.x / 32 == WARPS - 1) {
            int end_shift = flipped(pairs, sweep[SWEEP_FLIPS], sweep[SWEEP_FLIP_COUNT], outside);
            kept[0] = end_shift, kept[1] = (int)start, kept[2] = (int)((unsigned long long)start >> 32);
        }
    }
    __syncthreads();
    if (slots) find_factors(factors, shifts, local, last - first, p, false);
    fetched();
    __syncthreads();
    for (int i = 0; i < last - first; ++i) {
        const int *here = local + i * OP_FIELDS;
        Op op = op_at(here, 0);
        if (op[KIND] == TURNS) {
            turns(at, p, here, op, shifts + i, factors);
            i += op[PHASE_COUNT];
        } else if (shifts[i] >= 0 && op[KIND] == DENSE) {
            mix(tile, here, p, shifts[i], false);
        } else if (shifts[i] >= 0) {
            guarded_turn(tile, here, p, shifts[i]);
        }
        __syncthreads();
    }
    place start = (place)((unsigned long long)(unsigned)kept[2] << 32 | (unsigned)kept[1]);
    scatter(state, start, sweep, p, sweep[ORDER], kept[0], tile, scales[number]);
}
#endif

// ---- numbers for angles -----------------------------------------------------------------------------------------

// The entry of its table that a phase's record reads for a row number; -1 where a guard fails.
__device__ int entry_of(const int *record, int row) {
    const int *parity = record + 6;
    for (int i = 0; i < record[4]; ++i, parity += 3)
        if (odd(parity[0] & row) ^ parity[2]) return -1;
    int index = 0;
    for (int i = 0; i < record[5]; ++i, parity += 3) index = index << 1 | (odd(parity[0] & row) ^ parity[2]);
    return index;
}

#ifdef ONLY_bind
// Each block fills in one table of phases.
extern "C" __global__ void __launch_bounds__(THREADS) bind(
    const int *jobs, const int *terms, const double *tables, amplitude *phases) {
    const int *job = jobs + blockIdx.x * JOB_FIELDS;
    for (int i = threadIdx.x; i < job[JOB_SIZE]; i += THREADS) {
        double angle = 0;
        const int *record = terms + job[JOB_RECORDS];
        for (int k = 0; k < job[JOB_COUNT]; ++k, record += record[0]) {
            int index = entry_of(record, i << job[JOB_SHIFT]);
            if (index >= 0) angle += tables[record[1] + index];
        }
        double sine, cosine;
        sincos(angle, &sine, &cosine);
        phases[job[JOB_VALUES] + i] = {(real)cosine, (real)sine};
    }
}
#endif

// ---- gradients --------------------------------------------------------------------------------------------------

#ifdef ONLY_reverse

// The program backwards on a state and its co-state. Each warp adds up its share of every angle's gradient, tile after
// tile in a fixed order, so that the sum does not depend on which warp came first. Turns are divided as above; the host
// multiplies each angle's gradient by the square of what was divided out before it.

// Lane 8 k adds the warp's sum of values[k] to shares[which[k]], for k < count.
__device__ __forceinline__ void contribute(double *shares, const int (&which)[4], const real (&values)[4], int count) {
    int lane = threadIdx.x % 32;
    bool high = lane & 16, next = lane & 8;
    real a = high ? values[2] : values[0], b = high ? values[3] : values[1];
    a += __shfl_xor_sync(ALL, high ? values[0] : values[2], 16);
    b += __shfl_xor_sync(ALL, high ? values[1] : values[3], 16);
    real c = next ? b : a;
    c += __shfl_xor_sync(ALL, next ? a : b, 8);
#pragma unroll
    for (int far = 4; far; far >>= 1) c += __shfl_xor_sync(ALL, c, far);
    int mine = lane >> 3, to = mine == 0 ? which[0] : mine == 1 ? which[1] : mine == 2 ? which[2] : which[3];
    if (lane % 8 == 0 && mine < count) shares[to] += (double)c;
}

struct Back {
    const int *terms;
    const double *slopes;
    double *of_turns, *of_terms;  // this warp's share
    real *kept;                   // sums of threads over the tiles, for phases that have a slot (see keep)
};

__device__ __forceinline__ real weight_of(amplitude x, amplitude y) { return y.x * x.y - y.y * x.x; }

// What a record's angle gets from this thread's rows. The sum of their weights is sums[TOGETHER]; sums[b] is that with
// the signs of bit b of the register.
__device__ __forceinline__ real record_gradient(
    const int *record, const double *slopes, const real (&sums)[TOGETHER + 1], const amplitude (&x)[EACH],
    const amplitude (&y)[EACH], int shift) {
    int row = threadIdx.x ^ shift, mask = record[6] >> THREAD_BITS;
    real plain = sums[TOGETHER], total = 0;
    if (record[4] == 0 && record[5] == 1 && !(mask & (mask - 1))) {
        real low = (real)slopes[record[1]], high = (real)slopes[record[1] + 1], signs = plain;
#pragma unroll
        for (int bit = 0; bit < TOGETHER; ++bit) signs = mask >> bit & 1 ? sums[bit] : signs;
        bool flip = odd(record[6] & row) ^ record[8];
        return (low + high) / 2 * plain + (flip ? high - low : low - high) / 2 * signs;
    }
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        int index = entry_of(record, row ^ j << THREAD_BITS);
        if (index >= 0) total += (real)slopes[record[1] + index] * weight_of(x[j], y[j]);
    }
    return total;
}

// Add sums to those of the tiles before, in the order of the numbers that rows have without shift: what is left for each
// record is a sum over threads, at the end.
__device__ __forceinline__ void keep(real *kept, const real (&sums)[TOGETHER + 1], int shift) {
    int thread = (threadIdx.x ^ shift) & (THREADS - 1);
#pragma unroll
    for (int bit = 0; bit <= TOGETHER; ++bit)
        kept[bit * THREADS + thread] += bit < TOGETHER && shift >> (THREAD_BITS + bit) & 1 ? -sums[bit] : sums[bit];
}

// What the records of a phase get from kept sums; each warp takes some of the records.
__device__ void kept_gradients(const real *kept, const int *op, const Back &back) {
    const int *record = back.terms + op[ROWS];
    for (int n = 0; n < op[COUNT]; ++n, record += record[0]) {
        if (!record[3] || n % WARPS != threadIdx.x / 32) continue;
        int mask = record[6], registers = mask >> THREAD_BITS;
        double low = back.slopes[record[1]], high = back.slopes[record[1] + 1], total = 0;
        const real *signs = kept + (registers ? __ffs(registers) - 1 : TOGETHER) * THREADS;
        for (int t = threadIdx.x % 32; t < THREADS; t += 32) {
            double sign = odd(mask & t & (THREADS - 1)) ^ record[8] ? high - low : low - high;
            total += (low + high) * kept[TOGETHER * THREADS + t] + sign * signs[t];
        }
        for (int far = 16; far; far >>= 1) total += __shfl_xor_sync(ALL, total, far);
        if (threadIdx.x % 32 == 0) back.of_terms[record[2]] -= total;
    }
}

__device__ __forceinline__ void phase_gradients(
    const amplitude (&x)[EACH], const amplitude (&y)[EACH], const int *ops, int count, const int *shifts, int swapped,
    const Back &back) {
    real sums[TOGETHER + 1], found[4] = {0, 0, 0, 0};
    int which[4] = {0, 0, 0, 0}, waiting = 0;
#pragma unroll
    for (int bit = 0; bit <= TOGETHER; ++bit) sums[bit] = 0;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        real weight = weight_of(x[j], y[j]);
#pragma unroll
        for (int bit = 0; bit <= TOGETHER; ++bit) sums[bit] += j >> bit & 1 ? -weight : weight;
    }
    for (int k = 1; k <= count; ++k) {
        const int *op = ops + k * OP_FIELDS;
        if (op[SLOT] < 0 || shifts[k] < 0) continue;
        if (op[KEPT] >= 0) {
            keep(back.kept + op[KEPT] * (TOGETHER + 1) * THREADS, sums, shifts[k] ^ swapped << THREAD_BITS);
            continue;
        }
        const int *record = back.terms + op[ROWS];
        for (int n = 0; n < op[COUNT]; ++n, record += record[0]) {
            if (!record[3]) continue;
            real one = -2 * record_gradient(record, back.slopes, sums, x, y, shifts[k] ^ swapped << THREAD_BITS);
#pragma unroll
            for (int m = 0; m < 4; ++m)
                if (m == waiting) found[m] = one, which[m] = record[2];
            if (++waiting == 4) contribute(back.of_terms, which, found, 4), waiting = 0;
        }
    }
    if (waiting) contribute(back.of_terms, which, found, waiting);
}

// A pass undone: its phases, then its turns. Registers are as the turns want them, swapped bits swapped.
__device__ __forceinline__ void turns_back(
    unsigned tiles, const Program &p, const int *ops, const Op &op, const int *shifts, const amplitude *factors,
    const Back &back) {
    bool present = (int)threadIdx.x < op[ROW_COUNT];
    int swapped = op[SWAPPED], count = op[PHASE_COUNT];
    Rows rows(tiles, op, thread_row(p, ops) ^ shifts[0]);
    amplitude x[EACH], y[EACH];
    rows.first ^= rows.swap;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        x[j] = y[j] = {0, 0};
        if (present) x[j] = load<0>(rows.at(j), (real)0), y[j] = load<FULL>(rows.at(j), (real)0);
    }
    rows.first ^= rows.swap;
    if (count) {
        bool wanted = false;
        for (int k = 1; k <= count; ++k) wanted |= ops[k * OP_FIELDS + SLOT] >= 0 && shifts[k] >= 0;
        amplitude mine = conjugate(thread_factor(p, ops, count, shifts));
        if (wanted) phase_gradients(x, y, ops, count, shifts, swapped, back);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            amplitude value = mine;
            if (op[FACTORS] >= 0) value = times(mine, conjugate(factors[op[FACTORS] * EACH + j]));
            x[j] = times(x[j], value), y[j] = times(y[j], value);
        }
        each_table(p, ops, op, shifts, swapped, [&](amplitude value, int j) {
            x[j] = times(x[j], conjugate(value)), y[j] = times(y[j], conjugate(value));
        });
    }
    if (op[COUNT]) {
        real found[4] = {0, 0, 0, 0};
#pragma unroll
        for (int bit = 0; bit < TOGETHER; ++bit) {
            if (bit >= op[COUNT]) continue;
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                if (j >> bit & 1) continue;
                const int k = j | 1 << bit;
                found[bit] += y[k].x * x[j].x + y[k].y * x[j].y - y[j].x * x[k].x - y[j].y * x[k].y;
            }
            if (swapped >> bit & 1) found[bit] = -found[bit];
        }
        contribute(back.of_turns + op[SLOT], {0, 1, 2, 3}, found, op[COUNT]);
#pragma unroll
        for (int bit = 0; bit < TOGETHER; ++bit) {
            if (bit >= op[COUNT]) continue;
            real slope = -p.slopes[op[SLOT] + bit];
            slope_turn(x, bit, slope);
            slope_turn(y, bit, slope);
            if (swapped >> bit & 1) negate(x, bit, false), negate(y, bit, false);
        }
    }
    if (present) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) store<0>(rows.at(j), x[j]), store<FULL>(rows.at(j), y[j]);
    }
}

__device__ void guarded_turn_back(
    amplitude *psi, amplitude *lam, const int *op, const Program &p, int shift, const Back &back) {
    int count = op[ROW_COUNT], mask = op[MASK0];
    const int *rows = p.rows + op[ROWS];
    amplitude half = p.halves[op[SLOT]];
    real found[4] = {0, 0, 0, 0};
    for (int i = threadIdx.x; i < count; i += THREADS) {
        int row = rows[i] ^ shift;
        amplitude a = psi[row], b = psi[row ^ mask], c = lam[row], d = lam[row ^ mask];
        found[0] += d.x * a.x + d.y * a.y - c.x * b.x - c.y * b.y;
        psi[row] = {half.x * a.x + half.y * b.x, half.x * a.y + half.y * b.y};
        psi[row ^ mask] = {half.x * b.x - half.y * a.x, half.x * b.y - half.y * a.y};
        lam[row] = {half.x * c.x + half.y * d.x, half.x * c.y + half.y * d.y};
        lam[row ^ mask] = {half.x * d.x - half.y * c.x, half.x * d.y - half.y * c.y};
    }
    __syncwarp();
    contribute(back.of_turns + op[SLOT], {0, 0, 0, 0}, found, 1);
}

// Turns from `turn` and phase terms from `term` are this sweep's angles: `turns_here` and `terms_here` of them. Where
// `in_shared`, shares are added up in shared memory. `kept`: how many phases have slots for sums of threads.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_BACK) reverse(
    amplitude *state, amplitude *costate, const int *sweeps, int number, int first, int last, int room, int slots,
    const int *ops, const int *rows, const long long *pairs, const place *places, const amplitude *phases,
    const amplitude *matrices, const amplitude *halves, const real *slopes, const real *scales, const int *terms,
    const double *term_slopes, double *shares, int angles, int turned, int turn, int turns_here, int term, int terms_here, int in_shared,
    int kept) {
    const int *sweep = sweeps + number * SWEEP_FIELDS;
    Program p = {ops, rows, pairs, places, phases, matrices, halves, slopes, scales};
    int here = turns_here + terms_here, warp = threadIdx.x / 32;
    amplitude *factors = (amplitude *)shared;
    double *sums = (double *)(factors + slots * EACH);
    real *kept_sums = (real *)(sums + (in_shared ? WARPS * here : 0));
    int *local = (int *)(kept_sums + kept * (TOGETHER + 1) * THREADS), *shifts = local + (last - first) * OP_FIELDS;
    const unsigned at = tile_after(room);
    amplitude *psi = tile_at(at), *lam = tile_at(at + FULL);
    double *share = shares + (long long)(blockIdx.x * WARPS + warp) * angles;
    Back back = {terms, term_slopes, share, share + turned, kept_sums};
    if (in_shared) {
        back.of_turns = sums + warp * here - turn, back.of_terms = sums + warp * here + turns_here - term;
        for (int i = threadIdx.x; i < WARPS * here; i += THREADS) sums[i] = 0;
    }
    for (int i = threadIdx.x; i < kept * (TOGETHER + 1) * THREADS; i += THREADS) kept_sums[i] = 0;
    for (long long mine = blockIdx.x; mine < 1LL << sweep[OUTSIDE_BITS]; mine += gridDim.x) {
        long long outside = mine | ONE;
        place start = start_of(sweep, p, mine);
        int end_shift = flipped(pairs, sweep[SWEEP_FLIPS], sweep[SWEEP_FLIP_COUNT], outside);
        gather(state, start, sweep, p, sweep[ORDER], end_shift, psi);
        gather(costate, start, sweep, p, sweep[ORDER], end_shift, lam);
        find_shifts(local, shifts, p, first, last - first, outside);
        __syncthreads();
        if (slots) find_factors(factors, shifts, local, last - first, p, true);
        fetched();
        __syncthreads();
        for (int i = last - first - 1; i >= 0; --i) {
            const int *op = local + i * OP_FIELDS;
            if (op[KIND] == PHASE || shifts[i] < 0) continue;
            if (op[KIND] == TURNS) {
                turns_back(at, p, op, op_at(op, 0), shifts + i, factors, back);
            } else if (op[KIND] == DENSE) {
                mix(psi, op, p, shifts[i], true);
                mix(lam, op, p, shifts[i], true);
            } else {
                guarded_turn_back(psi, lam, op, p, shifts[i], back);
            }
            __syncthreads();
        }
        scatter(state, start, sweep, p, sweep[START], 0, psi, scales[number]);
        scatter(costate, start, sweep, p, sweep[START], 0, lam, scales[number]);
        __syncthreads();
    }
    for (int i = first; i < last; ++i) {
        const int *op = p.ops + i * OP_FIELDS;
        if (op[KIND] == PHASE && op[KEPT] >= 0) kept_gradients(kept_sums + op[KEPT] * (TOGETHER + 1) * THREADS, op, back);
    }
    if (in_shared) {
        __syncthreads();
        const double *mine = sums + warp * here;
        for (int i = threadIdx.x % 32; i < here; i += 32)
            share[i < turns_here ? turn + i : turned + term + i - turns_here] = mine[i];
    }
}
#endif
