// Contexts of execution that one OS thread switches between: by hand on x86-64, where it takes some
// fifteen instructions, with ucontext (two system calls) elsewhere.
#pragma once

#include <cstddef>

#if defined(__x86_64__) && !defined(EMU_USE_UCONTEXT)

// Saves what the callee must keep on the stack in use, and resumes another stack.
extern "C" void emu_switch_stack(void** save_top, void* top) noexcept;
asm(R"(
  .text
  .type emu_switch_stack, @function
emu_switch_stack:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
  .size emu_switch_stack, . - emu_switch_stack
)");

namespace emu {

class Context {
 public:
  // The next switch to this context calls `entry`, which must never return.
  void start(char* stack, size_t bytes, void (*entry)()) {
    constexpr int kSavedRegisters = 6;
    void** top = reinterpret_cast<void**>(stack + bytes);
    *--top = nullptr;  // where `entry` would return to; leaves the stack aligned as after a call
    *--top = reinterpret_cast<void*>(entry);
    top_ = top - kSavedRegisters;
  }

  void switch_to(Context& other) { emu_switch_stack(&top_, other.top_); }

 private:
  void* top_ = nullptr;
};

}  // namespace emu

#else

#include <ucontext.h>

namespace emu {

class Context {
 public:
  void start(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }

  void switch_to(Context& other) { swapcontext(&context_, &other.context_); }

 private:
  ucontext_t context_;
};

}  // namespace emu

#endif
