#include "json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "error.h"

namespace tvm_fuse {
namespace {

constexpr int kDeepest = 32;

class Parser {
 public:
  Parser(const std::string& text, const std::string& where) : text_(text), where_(where) {}

  Json parse() {
    Json value = parse_value(0);
    skip_space();
    if (at_ != text_.size()) fail("the end");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& wanted) const {
    throw damaged(where_ + ": no JSON at byte " + std::to_string(at_) + ": wanted " + wanted);
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool take(char wanted) {
    if (at_ >= text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }
  void skip_space() {
    while (at_ < text_.size() && (peek() == ' ' || peek() == '\n' || peek() == '\r' || peek() == '\t')) ++at_;
  }
  bool take_word(const char* word) {
    const std::string wanted = word;
    if (text_.compare(at_, wanted.size(), wanted) != 0) return false;
    at_ += wanted.size();
    return true;
  }

  Json parse_value(int depth) {
    if (depth > kDeepest) fail("at most " + std::to_string(kDeepest) + " levels");
    skip_space();
    Json value;
    if (peek() == '{') return parse_object(depth);
    if (peek() == '[') return parse_list(depth);
    if (peek() == '"') {
      value.kind = Json::Kind::kString;
      value.text = parse_string();
    } else if (take_word("true") || take_word("false")) {
      value.kind = Json::Kind::kBool;
      value.boolean = text_[at_ - 2] == 'u';
    } else if (!take_word("null")) {
      value.kind = Json::Kind::kNumber;
      value.text = parse_number();
    }
    return value;
  }

  Json parse_object(int depth) {
    Json value;
    value.kind = Json::Kind::kObject;
    std::set<std::string> names;
    take('{');
    skip_space();
    if (take('}')) return value;
    do {
      skip_space();
      std::string name = parse_string();
      if (!names.insert(name).second) fail("one " + quote(name));
      skip_space();
      if (!take(':')) fail("':'");
      value.members.emplace_back(std::move(name), parse_value(depth + 1));
      skip_space();
    } while (take(','));
    if (!take('}')) fail("',' or '}'");
    return value;
  }

  Json parse_list(int depth) {
    Json value;
    value.kind = Json::Kind::kList;
    take('[');
    skip_space();
    if (take(']')) return value;
    do {
      value.list.push_back(parse_value(depth + 1));
      skip_space();
    } while (take(','));
    if (!take(']')) fail("',' or ']'");
    return value;
  }

  bool take_digits() {
    const size_t start = at_;
    while (peek() >= '0' && peek() <= '9') ++at_;
    return at_ > start;
  }

  std::string parse_number() {
    const size_t start = at_;
    take('-');
    if (!take('0') && !take_digits()) fail("a value");
    if (take('.') && !take_digits()) fail("a digit");
    if (take('e') || take('E')) {
      if (!take('+')) take('-');
      if (!take_digits()) fail("a digit");
    }
    return text_.substr(start, at_ - start);
  }

  std::string parse_string() {
    if (!take('"')) fail("'\"'");
    std::string made;
    while (!take('"')) {
      if (at_ >= text_.size()) fail("'\"'");
      const unsigned char byte = static_cast<unsigned char>(text_[at_]);
      if (byte < 0x20) fail("no control character");
      if (byte >= 0x80) {
        copy_utf8(made);
      } else if (take('\\')) {
        append_escape(made);
      } else {
        made += text_[at_++];
      }
    }
    return made;
  }

  void append_escape(std::string& made) {
    static const std::string kMarks = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    const size_t found = at_ < text_.size() ? kMarks.find(text_[at_]) : std::string::npos;
    if (found != std::string::npos) {
      ++at_;
      made += kMeanings[found];
      return;
    }
    uint32_t code = parse_hex();
    if (code >= 0xd800 && code < 0xdc00) {
      if (!take('\\')) fail("the second half of a surrogate pair");
      const uint32_t low = parse_hex();
      if (low < 0xdc00 || low > 0xdfff) fail("the second half of a surrogate pair");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if ((code >= 0xdc00 && code < 0xe000) || code == 0) {
      fail("a character");
    }
    append_utf8(made, code);
  }

  uint32_t parse_hex() {
    if (!take('u')) fail("an escape of JSON");
    uint32_t code = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char digit = peek();
      const bool is_letter = (digit >= 'a' && digit <= 'f') || (digit >= 'A' && digit <= 'F');
      if (!is_letter && (digit < '0' || digit > '9')) fail("four hexadecimal digits");
      code = code * 16 + static_cast<uint32_t>(is_letter ? (digit | 0x20) - 'a' + 10 : digit - '0');
    }
    return code;
  }

  static void append_utf8(std::string& made, uint32_t code) {
    const auto add = [&made](uint32_t byte) { made += static_cast<char>(byte); };
    if (code < 0x80) return add(code);
    if (code < 0x800) {
      add(0xc0 | code >> 6);
    } else if (code < 0x10000) {
      add(0xe0 | code >> 12);
      add(0x80 | (code >> 6 & 0x3f));
    } else {
      add(0xf0 | code >> 18);
      add(0x80 | (code >> 12 & 0x3f));
      add(0x80 | (code >> 6 & 0x3f));
    }
    add(0x80 | (code & 0x3f));
  }

  // One character beyond ASCII: the shortest form, and no surrogate.
  void copy_utf8(std::string& made) {
    const unsigned char first = static_cast<unsigned char>(text_[at_]);
    const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4 || at_ + length > text_.size()) fail("UTF-8");
    uint32_t code = first & (0xffu >> (length + 1));
    for (size_t i = 1; i < length; ++i) {
      const unsigned char next = static_cast<unsigned char>(text_[at_ + i]);
      if ((next & 0xc0) != 0x80) fail("UTF-8");
      code = code << 6 | (next & 0x3f);
    }
    const uint32_t least = length == 4 ? 0x10000 : length == 3 ? 0x800 : 0x80;
    if (code < least || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) fail("UTF-8");
    made.append(text_, at_, length);
    at_ += length;
  }

  const std::string& text_;
  const std::string& where_;
  size_t at_ = 0;
};

std::string show(const Json& value) {
  switch (value.kind) {
    case Json::Kind::kNull: return "null";
    case Json::Kind::kBool: return value.boolean ? "true" : "false";
    case Json::Kind::kNumber: return value.text.substr(0, 60);
    case Json::Kind::kString: return quote(value.text.substr(0, 60));
    case Json::Kind::kList: return "a list of " + std::to_string(value.list.size());
    case Json::Kind::kObject: return "an object";
  }
  return "";
}

}  // namespace

Json parse_json(const std::string& text, const std::string& where) { return Parser(text, where).parse(); }

void Field::refuse(const std::string& wanted) const {
  throw damaged(where_ + ": the bundle is damaged: " + place_ + ": wanted " + wanted + ", got " + show(value_));
}

const Field& Field::only(std::initializer_list<const char*> names) const {
  if (value_.kind != Json::Kind::kObject) refuse("an object");
  for (const char* name : names) at(name);
  for (const auto& member : value_.members)
    if (std::find(names.begin(), names.end(), member.first) == names.end())
      throw damaged(where_ + ": the bundle is damaged: " + place_ + ": unknown field " + quote(member.first));
  return *this;
}

Field Field::at(const std::string& name) const {
  if (value_.kind != Json::Kind::kObject) refuse("an object");
  for (const auto& member : value_.members)
    if (member.first == name) return Field(member.second, place_.empty() ? name : place_ + "." + name, where_);
  throw damaged(where_ + ": the bundle is damaged: " + place_ + ": no field " + quote(name));
}

std::string Field::string() const {
  if (value_.kind != Json::Kind::kString) refuse("a string");
  return value_.text;
}

int64_t Field::integer() const {
  const Number got = number();
  if (!got.is_integer) refuse("an integer of 64 bits");
  return got.integer;
}

bool Field::boolean() const {
  if (value_.kind != Json::Kind::kBool) refuse("true or false");
  return value_.boolean;
}

double Field::real() const { return number().real; }

Number Field::number() const {
  if (value_.kind != Json::Kind::kNumber) refuse("a number");
  Number made;
  const char *first = value_.text.data(), *last = first + value_.text.size();
  const auto whole = std::from_chars(first, last, made.integer);
  made.is_integer = whole.ec == std::errc() && whole.ptr == last;
  const auto real = std::from_chars(first, last, made.real);
  if (real.ec != std::errc() || real.ptr != last || !std::isfinite(made.real)) refuse("a number that float64 holds");
  return made;
}

size_t Field::size() const {
  if (value_.kind != Json::Kind::kList) refuse("a list");
  return value_.list.size();
}

Field Field::at(size_t index) const {
  if (index >= size()) refuse("more than " + std::to_string(index) + " entries");
  return Field(value_.list[index], place_ + "[" + std::to_string(index) + "]", where_);
}

void Field::each(const std::function<void(const std::string&, const Field&)>& visit) const {
  if (value_.kind != Json::Kind::kObject) refuse("names with values");
  for (const auto& member : value_.members)
    visit(member.first, Field(member.second, place_ + "['" + member.first + "']", where_));
}

}  // namespace tvm_fuse
