//go:build !android && (amd64 || arm64 || loong64 || ppc64le || riscv64)

package cuload

import (
	"os"
	"runtime"
	"strings"
	"syscall"

	"github.com/ebitengine/purego"
)

var systemNames = []string{"libcuda.so.1", "libcuda.so"}

// systemFiles are where distributions, containers and WSL put the library.
var systemFiles = func() []string {
	triplet := map[string]string{
		"amd64": "x86_64", "arm64": "aarch64", "loong64": "loongarch64", "ppc64le": "powerpc64le", "riscv64": "riscv64",
	}[runtime.GOARCH] + "-linux-gnu"
	dirs := []string{
		"/usr/lib/wsl/lib",
		"/usr/lib/" + triplet,
		"/usr/lib/" + triplet + "/nvidia", // Jetson
		"/usr/lib/" + triplet + "/tegra",
		"/usr/lib64",
		"/usr/lib",
		"/usr/local/nvidia/lib64", // containers
		"/run/opengl-driver/lib",  // NixOS
	}
	list := make([]string, 0, 2*len(dirs))
	for _, d := range dirs {
		for _, n := range systemNames {
			list = append(list, d+"/"+n)
		}
	}
	return list
}()

// dlopen opens a library by its path, or by a name without a slash that the
// dynamic linker searches. What is at a path is looked at first: the linker
// would wait for ever at a pipe, and crash on a file that was cut short.
func dlopen(path string) (uintptr, error) {
	if strings.IndexByte(path, 0) >= 0 {
		return 0, &FileError{"the path contains a NUL byte"}
	}
	if strings.IndexByte(path, '/') >= 0 {
		if err := checkFile(path); err != nil {
			return 0, err
		}
	} else if len(path) > 255 {
		return 0, syscall.ENAMETOOLONG // the linker copies names to its stack
	}
	// dlerror answers for the calling thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// Unresolved symbols fail here, and not at their first call.
	h, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return 0, &LinkError{linkText(path, err)}
	}
	return h, nil
}

// linkText is what the dynamic linker says, without the path that it repeats.
func linkText(path string, err error) string {
	text := strings.TrimSpace(err.Error())
	for {
		rest, ok := strings.CutPrefix(text, path+": ")
		if !ok {
			break
		}
		text = rest
	}
	if text == "" {
		return "the dynamic linker gives no reason"
	}
	return text
}

// checkFile tells why the dynamic linker cannot load the file.
func checkFile(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return reason(err)
	}
	if !info.Mode().IsRegular() {
		return &FileError{"not a regular file: " + info.Mode().Type().String()}
	}
	f, err := os.Open(path)
	if err != nil {
		return reason(err)
	}
	defer f.Close()
	return checkELF(f, info.Size())
}

// reason strips operation and path from an error of package os.
func reason(err error) error {
	if e, ok := err.(*os.PathError); ok {
		return e.Err
	}
	return err
}

func dlsym(h uintptr, name string) uintptr {
	addr, err := purego.Dlsym(h, name)
	if err != nil {
		return 0
	}
	return addr
}

func dlclose(h uintptr) { _ = purego.Dlclose(h) }
