// Checks that go on after a failure; `failures` is the exit code.
#pragma once

#include <iostream>
#include <string>

inline int failures = 0;

inline void check(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::cerr << "FAILED: " << what << "\n";
}

template <class A, class B>
void check_equal(const A& got, const B& wanted, const std::string& what) {
  if (got == wanted) return;
  ++failures;
  std::cerr << "FAILED: " << what << "\n  got    " << got << "\n  wanted " << wanted << "\n";
}

inline void check_contains(const std::string& text, const std::string& part, const std::string& what) {
  check(text.find(part) != std::string::npos, what + ": no '" + part + "' in: " + text);
}
