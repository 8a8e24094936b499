// While kernels run, SIGSEGV, SIGBUS and SIGFPE of their OS thread are faults of the emulated thread.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <cstddef>

#include "emulator/scheduler.h"

namespace emu {

class SignalGuard {
 public:
  SignalGuard() {
    guarded_thread = pthread_self();
    stack_t stack{};
    stack.ss_sp = handler_stack;
    stack.ss_size = sizeof handler_stack;
    sigaltstack(&stack, &previous_stack_);
    struct sigaction action {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // the handler is left by a switch of stacks
    for (size_t i = 0; i < kCount; ++i) sigaction(kSignals[i], &action, &previous[i]);
  }

  ~SignalGuard() {
    for (size_t i = 0; i < kCount; ++i) sigaction(kSignals[i], &previous[i], nullptr);
    sigaltstack(&previous_stack_, nullptr);
  }

  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;

 private:
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
  static constexpr size_t kCount = sizeof kSignals / sizeof *kSignals;

  static inline pthread_t guarded_thread;
  static inline struct sigaction previous[kCount];
  static inline char handler_stack[64 << 10];

  static void handle(int signal, siginfo_t* info, void*) {
    if (!pthread_equal(pthread_self(), guarded_thread)) return pass_on(signal);
    if (signal == SIGFPE) fail(kArithmetic, "division by zero");
    fail(kOutOfBounds, "out of bounds: address %p is no memory", info->si_addr);
  }

  // Of another OS thread, which faults again when this returns.
  static void pass_on(int signal) {
    for (size_t i = 0; i < kCount; ++i) {
      if (kSignals[i] == signal) sigaction(signal, &previous[i], nullptr);
    }
  }

  stack_t previous_stack_{};
};

}  // namespace emu
