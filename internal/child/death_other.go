//go:build !linux

package child

import "syscall"

// Other kernels have no such signal. There a killed parent leaves its children behind.
func setParentDeathSignal(*syscall.SysProcAttr, syscall.Signal) {}
