//go:build windows && (amd64 || arm64)

package cuload

import (
	"os"
	"path/filepath"
	"syscall"
	"unsafe"
)

// systemFiles has no search path but System32: a library of that name beside
// the program or in the current folder is not the driver.
var (
	systemNames = []string{"nvcuda.dll"}
	systemFiles []string
)

// Flags of LoadLibraryExW.
const (
	searchDLLDir   = 0x100 // LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR
	searchSystem32 = 0x800 // LOAD_LIBRARY_SEARCH_SYSTEM32
)

var loadLibraryEx = syscall.NewLazyDLL("kernel32.dll").NewProc("LoadLibraryExW")

// dlopen opens nvcuda.dll from System32, or another path as a file.
func dlopen(path string) (uintptr, error) {
	flags := uintptr(searchSystem32)
	if path != systemNames[0] {
		info, err := os.Stat(path)
		if err != nil {
			if e, ok := err.(*os.PathError); ok {
				err = e.Err
			}
			return 0, err
		}
		if !info.Mode().IsRegular() {
			return 0, &FileError{"not a regular file: " + info.Mode().Type().String()}
		}
		if path, err = filepath.Abs(path); err != nil {
			return 0, err
		}
		flags |= searchDLLDir
	}
	name, err := syscall.UTF16PtrFromString(path)
	if err != nil {
		return 0, &FileError{"the path contains a NUL byte"}
	}
	h, _, errno := loadLibraryEx.Call(uintptr(unsafe.Pointer(name)), 0, flags)
	if h == 0 {
		return 0, &LinkError{errno.Error()}
	}
	return h, nil
}

func dlsym(h uintptr, name string) uintptr {
	addr, err := syscall.GetProcAddress(syscall.Handle(h), name)
	if err != nil {
		return 0
	}
	return addr
}

func dlclose(h uintptr) { _ = syscall.FreeLibrary(syscall.Handle(h)) }
