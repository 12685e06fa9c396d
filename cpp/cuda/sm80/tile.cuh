// Tiles in shared memory: rows of `kColumns` elements, their 16-byte chunks permuted within a row
// so that the eight rows of an ldmatrix lie in different banks, and the fragments read from them.
//
// Rows of a multiple of 128 bytes permute eight chunks by the row's last three bits; of others, 64
// (32, 16) bytes long or 192, several rows already lie in different banks: they permute four (two,
// one) chunks by the bits above the last (the last two, three). A permutation is an XOR, so that
// rows whose numbers share no bit permute by one another's.
#pragma once

#include <cstdint>

#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/sm80/element.cuh"

namespace jaxflash::cuda::sm80 {

template <class T_, int kColumns_>
struct TileLayout {
  using T = T_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kRowBytes = kColumns * kSize<T>;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kChunkElements = 16 / kSize<T>;
  // Chunks permuted among themselves.
  static constexpr int kSpan = kChunks % 8 == 0   ? 8
                               : kChunks % 4 == 0 ? 4
                               : kChunks % 2 == 0 ? 2
                                                  : 1;
  static constexpr int kSpanStride = kSpan * 16;  // bytes from one such span of a row to the next
  static_assert(kRowBytes % 16 == 0);

  static __device__ __forceinline__ uint32_t mask(uint32_t row) {
    return row / (8 / kSpan) % kSpan;
  }
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ mask(row)) * 16);
  }
  // Of one element.
  static __device__ __forceinline__ uint32_t element_offset(int row, int column) {
    return offset(row, column / kChunkElements) + column % kChunkElements * kSize<T>;
  }
};

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }

// Where one lane reads: the address of its row and chunk in the block of 16 rows and 32 bytes at
// (row0, step0), from which the blocks around it are reached by an XOR (steps along the row) and an
// addition (rows in multiples of 8), both of constants.
//
// `kAround`: how many steps along the row are walked from step0 on. Where they and the
// permutation's span do not divide one another, the address is computed anew for each.
template <class Layout, int kAround>
struct LaneAddress {
  static constexpr int kSteps = Layout::kSpan / 2;
  static constexpr bool kByXor = kAround % kSteps == 0 || kSteps % kAround == 0;
  uint32_t base;
  int step0;

  __device__ __forceinline__ LaneAddress(uint32_t tile, int row0, int step0, int row, int chunk)
      : base(tile + Layout::offset(row0 + row, kByXor ? 2 * step0 + chunk : chunk)), step0(step0) {}

  __device__ __forceinline__ uint32_t at(int row, int step) const {
    if (!kByXor) step += step0;
    return (base ^ (32 * (step % kSteps))) + step / kSteps * (kSteps * 32) +
           row * Layout::kRowBytes;
  }
};

// A operands [16 rows][k-step] from rows of the tile (k along the row), and B operands
// [k-step][16 columns] where the tile's rows are the columns of B. From row0 on.
template <class Layout>
struct RowsA {
  LaneAddress<Layout, Layout::kChunks / 2> lane;

  __device__ __forceinline__ RowsA(uint32_t tile, int row0)
      : lane(tile, row0, 0, lane_id() & 15, lane_id() >> 4) {}

  __device__ __forceinline__ OperandA<typename Layout::T> load(int row, int step) const {
    OperandA<typename Layout::T> a;
    ptx::ldmatrix_x4(a.word, lane.at(row, step));
    a.split();
    return a;
  }
};

template <class Layout>
struct RowsB {
  LaneAddress<Layout, Layout::kChunks / 2> lane;

  __device__ __forceinline__ RowsB(uint32_t tile, int row0)
      : lane(tile, row0, 0, (lane_id() & 7) + (lane_id() >> 4) * 8, (lane_id() >> 3) & 1) {}

  __device__ __forceinline__ OperandB<typename Layout::T> load(int row, int step) const {
    OperandB<typename Layout::T> b;
    ptx::ldmatrix_x4(b.word, lane.at(row, step));
    b.split();
    return b;
  }
};

// Which half of its rows and of its columns one of an operand's four words stands for.
struct Quarter {
  int row, column;
};
template <bool kOfA>
__device__ __forceinline__ Quarter quarter_of(int word) {
  return kOfA ? Quarter{word >> 1, word & 1} : Quarter{word & 1, word >> 1};
}

// Operands whose k runs down the tile, kStep rows a step: the tile's columns are the rows of A, or
// the columns of B. kSixteens of 16 columns from column0 on.
//
// Floats: the k-step takes its eight rows in the order 0 2 4 6 1 3 5 7, as the operand A made from
// accumulators (accumulator_a) does.
template <class Layout, int kSixteens, bool kOfA, bool = kIsFloat<typename Layout::T>>
struct Columns {
  LaneAddress<Layout, kSixteens> lane;

  // A lane gives the address of a row of the matrix that becomes word lane / 8.
  __device__ __forceinline__ Columns(uint32_t tile, int column0)
      : lane(tile, 0, column0 / 16, (lane_id() & 7) + quarter_of<kOfA>(lane_id() >> 3).row * 8,
             quarter_of<kOfA>(lane_id() >> 3).column) {}

  __device__ __forceinline__ Operand<typename Layout::T, 4> load(int step, int sixteen) const {
    Operand<typename Layout::T, 4> operand;
    ptx::ldmatrix_x4_transposed(operand.word, lane.at(16 * step, sixteen));
    return operand;
  }
};

template <class Layout, int kSixteens, bool kOfA>
struct Columns<Layout, kSixteens, kOfA, true> {
  LaneAddress<Layout, 2 * kSixteens> lane;  // of even rows

  // A lane reads rows 2 * (lane % 4) and the next, columns lane / 4 and 8 on.
  __device__ __forceinline__ Columns(uint32_t tile, int column0)
      : lane(tile, 0, column0 / 8, 2 * (lane_id() & 3), lane_id() >> 4) {
    lane.base += (lane_id() >> 2) % 4 * 4;  // within the chunk
  }

  __device__ __forceinline__ Operand<typename Layout::T, 4> load(int step, int sixteen) const {
    Operand<typename Layout::T, 4> operand;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Quarter quarter = quarter_of<kOfA>(i);
      const uint32_t even = lane.at(8 * step, 2 * sixteen + quarter.column);
      const uint32_t odd = (even ^ (Layout::mask(1) * 16)) + Layout::kRowBytes;
      operand.word[i] = ptx::load_shared(quarter.row != 0 ? odd : even);
    }
    operand.split();
    return operand;
  }
};

template <class Layout, int kStrips>
using ColumnsA = Columns<Layout, kStrips, true>;
template <class Layout, int kPairs>
using ColumnsB = Columns<Layout, kPairs, false>;

// As RowsA, but floats with the elements of a k-step in Columns' order.
template <class Layout>
struct RowsAPermuted {
  static constexpr bool kFloat = kIsFloat<typename Layout::T>;
  LaneAddress<Layout, Layout::kChunks / 2> lane;

  // Floats: elements 2 * (lane % 4) and the next of rows lane / 4 and 8 below.
  __device__ __forceinline__ RowsAPermuted(uint32_t tile, int row0)
      : lane(tile, row0, 0, kFloat ? lane_id() >> 2 : lane_id() & 15,
             kFloat ? (lane_id() >> 1) & 1 : lane_id() >> 4) {
    if (kFloat) lane.base += (lane_id() & 1) * 8;
  }

  __device__ __forceinline__ OperandA<typename Layout::T> load(int row, int step) const {
    OperandA<typename Layout::T> a;
    if constexpr (kFloat) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint2 pair = ptx::load_shared_2(lane.at(row + 8 * half, step));
        a.word[half] = pair.x;
        a.word[2 + half] = pair.y;
      }
    } else {
      ptx::ldmatrix_x4(a.word, lane.at(row, step));
    }
    a.split();
    return a;
  }
};

// The A operand of k-step `step` from a strip of accumulators d[block][4], 16 rows and 8 columns a
// block.
//
// 16-bit types: accumulator columns 2c, 2c + 1 of blocks 2 * step and 2 * step + 1 become elements
// 2c, 2c + 1 and 2c + 8, 2c + 9 of the k-step, which the same thread holds: only packing is needed.
// Floats: columns 2c and 2c + 1 of block `step` become elements c and c + 4, which permutes the
// k-step as Columns do.
template <class T, int kBlocks>
__device__ __forceinline__ OperandA<T> accumulator_a(const float (&d)[kBlocks][4], int step) {
  OperandA<T> a;
  if constexpr (kIsFloat<T>) {
    a.word[0] = __float_as_uint(d[step][0]);
    a.word[1] = __float_as_uint(d[step][2]);
    a.word[2] = __float_as_uint(d[step][1]);
    a.word[3] = __float_as_uint(d[step][3]);
    a.split();
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&block)[4] = d[2 * step + (i >> 1)];
      a.word[i] = pack(T(), block[2 * (i & 1)], block[2 * (i & 1) + 1]);
    }
  }
  return a;
}

// Rows of an array in global memory, at the head and batch of this block.
struct Rows {
  const void* data = nullptr;
  int64_t stride = 0;    // elements between rows
  int columns = 0;       // that exist
  bool vectors = false;  // rows can be copied in aligned 16-byte pieces
};

template <class T>
__device__ __forceinline__ uint4 gather_chunk(const typename T::Bits* from, int count) {
  uint4 chunk = {0, 0, 0, 0};
  auto* words = reinterpret_cast<uint32_t*>(&chunk);
#pragma unroll
  for (int i = 0; i < 16 / kSize<T>; ++i) {
    if (i < count) {
      const uint32_t bits = from[i];
      words[i * kSize<T> / 4] |= kIsFloat<T> ? bits : bits << (i % 2 * 16);
    }
  }
  return chunk;
}

// The first of a tile's rows.
struct TileRows {
  const void* data;
  uint32_t row_bytes;  // between rows
  int columns;         // that exist
  int count;           // rows that exist, which may be negative
};

// Starts to copy a tile in 16-byte pieces; zeros past the rows and columns that exist. All of the
// block's kThreads take part. Done for the calling thread once its cp.async groups are, for the
// others after a barrier.
template <class Layout, int kRows, int kThreads>
__device__ __forceinline__ void copy_tile(uint32_t tile, const TileRows& rows) {
  constexpr int kChunks = Layout::kChunks;
  constexpr int kCopies = (kRows * kChunks + kThreads - 1) / kThreads;
  constexpr int kPass = kThreads / kChunks;  // rows that one copy of every thread takes
  const char* from = static_cast<const char*>(rows.data);
  if constexpr (kThreads % kChunks == 0 && (kPass % 8 == 0 || 8 % kPass == 0)) {
    // A thread stays in its column: addresses move on by constants, those of chunks by an XOR.
    const int thread = ptx::thread_index();
    const int row = thread / kChunks, chunk = thread % kChunks;
    const int left = chunk * Layout::kChunkElements < rows.columns ? rows.count - row : 0;
    const uint32_t to = tile + Layout::offset(row, chunk);
    from += row * rows.row_bytes + chunk * 16;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (kRows % kPass != 0 && row + i * kPass >= kRows) break;
      ptx::cp_async_16((to ^ (Layout::mask(i * kPass) * 16)) + i * kPass * Layout::kRowBytes, from,
                       i * kPass < left);
      from += kPass * rows.row_bytes;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int copy = threadIdx.x + i * kThreads;
      const int row = copy / kChunks, chunk = copy % kChunks;
      if (kRows * kChunks % kThreads != 0 && row >= kRows) break;
      ptx::cp_async_16(tile + Layout::offset(row, chunk),
                       from + uint64_t{rows.row_bytes} * row + chunk * 16,
                       row < rows.count && chunk * Layout::kChunkElements < rows.columns);
    }
  }
}

// The same from anywhere, at once.
template <class Layout, int kRows, int kThreads>
__device__ __forceinline__ void gather_tile(uint32_t tile, const Rows& rows, int64_t first,
                                            int count) {
  constexpr int kChunks = Layout::kChunks;
  const auto* from = static_cast<const typename Layout::T::Bits*>(rows.data) + first * rows.stride;
#pragma unroll 1
  for (int copy = ptx::thread_index(); copy < kRows * kChunks; copy += kThreads) {
    const int row = copy / kChunks, chunk = copy % kChunks;
    const int column = chunk * Layout::kChunkElements;
    const int left = row < count ? rows.columns - column : 0;
    ptx::store_shared_4(tile + Layout::offset(row, chunk),
                        gather_chunk<typename Layout::T>(from + row * rows.stride + column, left));
  }
}

// Rows from `first` on for copy_tile, of those that allow it.
template <class T>
__device__ __forceinline__ TileRows tile_rows(const Rows& rows, uint32_t first, int count) {
  const auto row_bytes = static_cast<uint32_t>(rows.stride) * kSize<T>;
  return {static_cast<const char*>(rows.data) + uint64_t{first} * row_bytes, row_bytes,
          rows.columns, count};
}

// Starts to copy rows [first, first + kRows) to a tile; zeros from row `end` on and past the
// columns.
template <class Layout, int kRows, int kThreads>
__device__ __forceinline__ void load_tile(uint32_t tile, const Rows& rows, int first, int end) {
  if (rows.vectors) {
    copy_tile<Layout, kRows, kThreads>(tile,
                                       tile_rows<typename Layout::T>(rows, first, end - first));
  } else {
    gather_tile<Layout, kRows, kThreads>(tile, rows, first, end - first);
  }
}

// Two tiles of the same rows of two arrays. One stretch of code: their addresses are computed side
// by side.
template <class Layout, int kRows, int kThreads>
__device__ __forceinline__ void load_tiles(uint32_t tile, const Rows& rows, uint32_t other_tile,
                                           const Rows& other, int first, int end) {
  using T = typename Layout::T;
  if (rows.vectors && other.vectors) {
    copy_tile<Layout, kRows, kThreads>(tile, tile_rows<T>(rows, first, end - first));
    copy_tile<Layout, kRows, kThreads>(other_tile, tile_rows<T>(other, first, end - first));
  } else {
    gather_tile<Layout, kRows, kThreads>(tile, rows, first, end - first);
    gather_tile<Layout, kRows, kThreads>(other_tile, other, first, end - first);
  }
}

// Stores the first `count` elements of a chunk; `vector`: all of them, to an aligned place.
template <class T>
__device__ __forceinline__ void store_chunk(typename T::Bits* to, const uint4& words, int count,
                                            bool vector) {
  if (vector) {
    *reinterpret_cast<uint4*>(to) = words;
    return;
  }
  const uint32_t parts[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 16 / kSize<T>; ++i) {
    if (i >= count) break;
    to[i] = static_cast<typename T::Bits>(kIsFloat<T> ? parts[i % 4]
                                                      : parts[i / 2 % 4] >> (i % 2 * 16));
  }
}

// Copies rows [0, kRows) of a tile to rows first .. of an array, as far as they lie before `end`
// and within the columns. All of the kThreads threads numbered `thread` take part.
template <class Layout, int kRows, int kThreads>
__device__ __forceinline__ void store_tile(uint32_t tile, const Rows& rows, int64_t first,
                                           int64_t end, int thread) {
  using T = typename Layout::T;
  constexpr int kChunks = Layout::kChunks;
  constexpr int kPass = kThreads / kChunks;  // as in copy_tile
  auto* to = static_cast<typename T::Bits*>(const_cast<void*>(rows.data)) + first * rows.stride;
  const int count = static_cast<int>(min(end - first, int64_t{kRows}));
  if constexpr (kThreads % kChunks == 0 && (kPass % 8 == 0 || 8 % kPass == 0)) {
    const int row = thread / kChunks, chunk = thread % kChunks;
    const int column = chunk * Layout::kChunkElements;
    const int left = column < rows.columns ? count - row : 0;
    const uint32_t from = tile + Layout::offset(row, chunk);
    to += row * rows.stride + column;
#pragma unroll 4
    for (int i = 0; i * kPass < left; ++i) {
      store_chunk<T>(to,
                     ptx::load_shared_4((from ^ (Layout::mask(i * kPass) * 16)) +
                                        i * kPass * Layout::kRowBytes),
                     rows.columns - column, rows.vectors);
      to += kPass * rows.stride;
    }
  } else {
    for (int copy = thread; copy < kRows * kChunks; copy += kThreads) {
      const int row = copy / kChunks, chunk = copy % kChunks;
      const int column = chunk * Layout::kChunkElements;
      if (row >= count || column >= rows.columns) continue;
      store_chunk<T>(to + row * rows.stride + column,
                     ptx::load_shared_4(tile + Layout::offset(row, chunk)), rows.columns - column,
                     rows.vectors);
    }
  }
}

// Writes a strip of accumulators d[block][4] to rows row .. row + 15 of a tile, from column
// 8 * first_block on, a multiple of the strip's columns.
template <class Layout, int kBlocks>
__device__ __forceinline__ void write_strip(uint32_t tile, int row, int first_block,
                                            const float (&d)[kBlocks][4]) {
  using T = typename Layout::T;
  // 8 columns are one chunk of a 16-bit type: blocks are reached by an XOR, as in LaneAddress.
  constexpr bool kByXor =
      !kIsFloat<T> && (kBlocks == 2 || kBlocks == 4 || kBlocks == 8) && kBlocks <= Layout::kSpan;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at_row = row + (lane_id() >> 2) + 8 * half;
    const int column = 2 * (lane_id() & 3);
    const uint32_t base = tile + Layout::element_offset(at_row, 8 * first_block + column);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint32_t to =
          kByXor ? base ^ (16 * block)
                 : tile + Layout::element_offset(at_row, 8 * (first_block + block) + column);
      const float x = d[block][2 * half], y = d[block][2 * half + 1];
      if constexpr (kIsFloat<T>) {
        ptx::store_shared_2(to, {__float_as_uint(x), __float_as_uint(y)});
      } else {
        ptx::store_shared(to, pack(T(), x, y));
      }
    }
  }
}

}  // namespace jaxflash::cuda::sm80
