#include "npz.h"

#include <cstring>
#include <utility>

#include "error.h"

namespace tvm_fuse {
namespace {

constexpr uint32_t kEntry = 0x02014b50, kLocal = 0x04034b50, kEnd = 0x06054b50;
constexpr uint32_t kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
constexpr size_t kEntryBytes = 46, kLocalBytes = 30, kEndBytes = 22, kLocator64Bytes = 20, kEnd64Bytes = 56;
constexpr size_t kMostComment = 65535;
constexpr uint64_t kIn64 = 0xffffffff;  // "the number is in the ZIP64 field"

class Zip {
 public:
  Zip(Bytes file, const std::string& where) : file_(file), where_(where) {}

  std::map<std::string, Bytes> members() const {
    const auto [count, start] = find_directory();
    std::map<std::string, Bytes> made;
    uint64_t at = start;
    for (uint64_t i = 0; i < count; ++i) at = add_member(at, made);
    return made;
  }

 private:
  void require(bool holds, const std::string& wanted) const {
    if (!holds) throw damaged(where_ + ": cannot be read: no npz file: wanted " + wanted);
  }

  template <class T>
  T read(uint64_t at) const {
    require(at <= file_.size && sizeof(T) <= file_.size - at, "a number at byte " + std::to_string(at));
    T value;
    std::memcpy(&value, file_.data + at, sizeof value);  // ZIP is little-endian, as CUDA's hosts are
    return value;
  }

  Bytes slice(uint64_t at, uint64_t size, const std::string& what) const {
    require(at <= file_.size && size <= file_.size - at,
            std::to_string(size) + " bytes of " + what + " at byte " + std::to_string(at) + " of " +
                std::to_string(file_.size));
    return {file_.data + at, static_cast<size_t>(size)};
  }

  // Number of entries, and where they begin.
  std::pair<uint64_t, uint64_t> find_directory() const {
    require(file_.size >= kEndBytes, "an end of the directory");
    const size_t last = file_.size - kEndBytes, first = last > kMostComment ? last - kMostComment : 0;
    size_t at = last;
    while (read<uint32_t>(at) != kEnd) {
      require(at > first, "an end of the directory");
      --at;
    }
    const uint64_t count = read<uint16_t>(at + 10), start = read<uint32_t>(at + 16);
    if (count != 0xffff && start != kIn64) return {count, start};
    require(at >= kLocator64Bytes && read<uint32_t>(at - kLocator64Bytes) == kLocator64, "a ZIP64 locator");
    const uint64_t end = read<uint64_t>(at - kLocator64Bytes + 8);
    slice(end, kEnd64Bytes, "the ZIP64 end");
    require(read<uint32_t>(end) == kEnd64, "a ZIP64 end of the directory");
    return {read<uint64_t>(end + 32), read<uint64_t>(end + 48)};
  }

  // Returns where the next entry begins.
  uint64_t add_member(uint64_t at, std::map<std::string, Bytes>& made) const {
    slice(at, kEntryBytes, "an entry");
    require(read<uint32_t>(at) == kEntry, "an entry of the directory at byte " + std::to_string(at));
    const uint16_t flags = read<uint16_t>(at + 8), method = read<uint16_t>(at + 10);
    uint64_t packed = read<uint32_t>(at + 20), size = read<uint32_t>(at + 24), start = read<uint32_t>(at + 42);
    const uint64_t name_bytes = read<uint16_t>(at + 28), extra_bytes = read<uint16_t>(at + 30);
    const Bytes name_at = slice(at + kEntryBytes, name_bytes, "a name");
    const std::string name(reinterpret_cast<const char*>(name_at.data), name_at.size);
    read_zip64(slice(at + kEntryBytes + name_bytes, extra_bytes, "an extra field"), size, packed, start);
    require(method == 0 && packed == size, quote(name) + " stored as numpy.savez does, not compressed");
    require((flags & 1) == 0, quote(name) + " not encrypted");

    slice(start, kLocalBytes, "a local header");
    require(read<uint32_t>(start) == kLocal, "a local header of " + quote(name));
    const uint64_t head = kLocalBytes + read<uint16_t>(start + 26) + uint64_t{read<uint16_t>(start + 28)};
    require(made.emplace(name, slice(start + head, size, quote(name))).second, "one " + quote(name));
    return at + kEntryBytes + name_bytes + extra_bytes + read<uint16_t>(at + 32);
  }

  // Replaces the numbers that are in the ZIP64 field, which holds those only, in this order.
  void read_zip64(Bytes extra, uint64_t& size, uint64_t& packed, uint64_t& start) const {
    for (size_t at = 0; at + 4 <= extra.size;) {
      uint16_t id, bytes;
      std::memcpy(&id, extra.data + at, 2);
      std::memcpy(&bytes, extra.data + at + 2, 2);
      at += 4;
      require(bytes <= extra.size - at, "an extra field of " + std::to_string(bytes) + " bytes");
      size_t next = at;
      for (uint64_t* number : {&size, &packed, &start}) {
        if (id != 1 || *number != kIn64) continue;
        require(next + 8 <= at + bytes, "a ZIP64 number");
        std::memcpy(number, extra.data + next, 8);
        next += 8;
      }
      at += bytes;
    }
  }

  Bytes file_;
  const std::string& where_;
};

// An npy header is a dictionary of Python, whose form numpy.lib.format fixes.
// What lies between `before` and `after` in a text; empty when they are not there.
std::string between(const std::string& text, const std::string& before, const std::string& after) {
  const size_t start = text.find(before);
  if (start == std::string::npos) return "";
  const size_t end = text.find(after, start + before.size());
  return end == std::string::npos ? "" : text.substr(start + before.size(), end - start - before.size());
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string made;
  for (size_t i = 0; i < shape.size(); ++i) made += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return shape.size() == 1 ? made + "," : made;
}

// Column-major elements in C order.
std::vector<uint8_t> transpose(const uint8_t* data, const Tensor& tensor) {
  const size_t item = tensor.dtype->size_bytes, rank = tensor.shape.size();
  std::vector<uint8_t> made(tensor.size_bytes());
  std::vector<size_t> index(rank, 0);
  for (size_t to = 0; to < tensor.elements; ++to) {
    size_t from = 0;
    for (size_t axis = rank; axis-- > 0;) from = from * static_cast<size_t>(tensor.shape[axis]) + index[axis];
    std::memcpy(made.data() + to * item, data + from * item, item);
    for (size_t axis = rank; axis-- > 0;) {
      if (++index[axis] < static_cast<size_t>(tensor.shape[axis])) break;
      index[axis] = 0;
    }
  }
  return made;
}

}  // namespace

Npz::Npz(Bytes file, std::string where) : where_(std::move(where)), members_(Zip(file, where_).members()) {}

std::vector<uint8_t> Npz::read(const std::string& key, const std::string& port, const Tensor& tensor) const {
  const auto found = members_.find(key + ".npy");
  if (found == members_.end()) throw damaged(where_ + ": no array " + quote(key) + " for " + quote(port));
  const Bytes file = found->second;
  const auto refuse = [&](const std::string& got) {
    throw damaged(where_ + ": " + quote(port) + ": wanted " + tensor.text() + ", got " + got);
  };
  static const char kMagic[] = "\x93NUMPY";
  if (file.size < 12 || std::memcmp(file.data, kMagic, 6) != 0) refuse("no npy file");
  const bool is_first = file.data[6] == 1;  // version 1 has a length of 2 bytes, later ones of 4
  const size_t head = is_first ? 10 : 12;
  const size_t length = file.data[8] | file.data[9] << 8 |
                        (is_first ? 0 : size_t{file.data[10]} << 16 | size_t{file.data[11]} << 24);
  if (length > file.size - head) refuse("a header of " + std::to_string(length) + " bytes");
  const std::string text(reinterpret_cast<const char*>(file.data + head), length);
  const std::string descr = between(text, "'descr': '", "'"), shape = between(text, "'shape': (", ")");
  const std::string order = between(text, "'fortran_order': ", ",");
  const size_t size = file.size - head - length;
  const bool is_there = text.find("'shape': (" + shape + ")") != std::string::npos;
  if (descr != tensor.dtype->descr || !is_there || shape != shape_text(tensor.shape))
    refuse(quote(descr) + "[" + shape + "]");
  if (order != "True" && order != "False") refuse("the order " + quote(order));
  if (size != tensor.size_bytes()) refuse(std::to_string(size) + " bytes");
  const uint8_t* data = file.data + head + length;
  return order == "True" ? transpose(data, tensor) : std::vector<uint8_t>(data, data + size);
}

}  // namespace tvm_fuse
