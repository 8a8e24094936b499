// A strict reader of JSON (RFC 8259), small because a bundle's description is small and no library may be
// downloaded at build time. Stricter than the standard: no key twice, no NUL, UTF-8 without surrogates.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace tvm_fuse {

struct Json {
  enum class Kind { kNull, kBool, kNumber, kString, kList, kObject };

  Kind kind = Kind::kNull;
  bool boolean = false;
  std::string text;  // a string's contents; a number as it was written
  std::vector<Json> list;
  std::vector<std::pair<std::string, Json>> members;
};

// Throws Error (kBundle) with the offset at which `text` stops being JSON; `where` is named in messages.
Json parse_json(const std::string& text, const std::string& where);

// A number: exact where it is an integer of 64 bits.
struct Number {
  double real = 0;
  int64_t integer = 0;
  bool is_integer = false;
};

// A value with its place, for messages; every accessor throws Error (kBundle) when it is of another type.
class Field {
 public:
  Field(const Json& value, std::string place, const std::string& where)
      : value_(value), place_(std::move(place)), where_(where) {}

  // The members must be exactly `names`.
  const Field& only(std::initializer_list<const char*> names) const;
  Field at(const std::string& name) const;
  std::string string() const;
  int64_t integer() const;
  bool boolean() const;
  double real() const;
  Number number() const;
  size_t size() const;  // of a list
  Field at(size_t index) const;
  void each(const std::function<void(const std::string&, const Field&)>& visit) const;  // of an object

  template <class Make>
  auto list(Make make) const {
    std::vector<decltype(make(*this))> made;
    const size_t count = size();
    made.reserve(count);
    for (size_t i = 0; i < count; ++i) made.push_back(make(at(i)));
    return made;
  }

  [[noreturn]] void refuse(const std::string& wanted) const;

 private:
  const Json& value_;
  std::string place_;
  const std::string& where_;
};

}  // namespace tvm_fuse
