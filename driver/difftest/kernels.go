package difftest

import (
	"fmt"

	"github.com/purecuda/purecuda/driver/drivertest"
	"github.com/purecuda/purecuda/internal/cuapi"
)

func (p *player) loadModule() {
	m := new(cuapi.Module)
	image := mostly(p, drivertest.PTX, "this is no device code", drivertest.PTX[:len(drivertest.PTX)-10]+"\n\tnonsense;\n}\n", "", ".version 7.0\n.target sm_70\n.address_size 64\n")
	r := load(p.Table, m, image)
	if p.call(cuapi.IDModuleLoadDataEx, fmt.Sprint(len(image)), r) == cuapi.Success {
		p.modules = append(p.modules, *m)
		p.name("m", uint64(*m))
	}
	if n := len(p.modules); n > 1 {
		p.call(cuapi.IDModuleUnload, p.names[uint64(p.modules[0])], p.ModuleUnload(p.modules[0]))
		p.modules = p.modules[1:]
	}
}

func (p *player) askModule() {
	name := oneOf(p, "fill", "scale", "nop", "missing", "")
	if p.rng.IntN(2) == 0 {
		f := new(cuapi.Function)
		p.call(cuapi.IDModuleGetFunction, "code, "+name, p.ModuleGetFunction(f, p.code, cstring(name)))
		return
	}
	name = oneOf(p, "answer", "missing", "fill", "")
	d, n := new(cuapi.DevicePtr), new(uintptr)
	r := p.ModuleGetGlobal(d, n, p.code, cstring(name))
	p.call(cuapi.IDModuleGetGlobal, "code, "+name, r, *n)
}

func (p *player) askFunction() {
	if len(p.funcs) == 0 {
		return
	}
	f := oneOf(p, p.funcs...)
	switch p.rng.IntN(3) {
	case 0:
		attr, v := oneOf[int32](p, 0, 1, 2, 3, 8, 9, mostly[int32](p, 8, -1, 100)), new(int32)
		r := p.FuncGetAttribute(v, attr, f)
		p.call(cuapi.IDFuncGetAttribute, fmt.Sprint(attr, " ", p.names[uint64(f)]), r, *v)
	case 1:
		attr, v := oneOf[int32](p, 8, 8, 9, mostly[int32](p, 8, 0, 3)), oneOf[int32](p, 0, 1024, 48<<10, 227<<10, mostly[int32](p, 49152, 1<<30, -1, 101))
		p.call(cuapi.IDFuncSetAttribute, fmt.Sprint(p.names[uint64(f)], " ", attr, " ", v), p.FuncSetAttribute(f, attr, v))
		if attr == 8 { // it outlives the sequence
			p.call(cuapi.IDFuncSetAttribute, "back", p.FuncSetAttribute(f, 8, 48<<10))
		} else {
			p.FuncSetAttribute(f, 9, -1)
		}
	default:
		i, off, size := oneOf[uintptr](p, 0, 1, 2, 3, 4, 99), new(uintptr), new(uintptr)
		r := p.FuncGetParamInfo(f, i, off, size)
		p.call(cuapi.IDFuncGetParamInfo, fmt.Sprint(p.names[uint64(f)], " ", i), r, *off, *size)
	}
}

func (p *player) occupancy() {
	if len(p.funcs) == 0 {
		return
	}
	f, shared := oneOf(p, p.funcs...), oneOf[uintptr](p, 0, 0, 1024, 16<<10, 1<<20)
	n := new(int32)
	if p.rng.IntN(2) == 0 {
		threads := oneOf[int32](p, 1, 32, 100, 256, 1024, mostly[int32](p, 64, 0, -1, 1025))
		r := p.OccupancyMaxActiveBlocksPerMultiprocessor(n, f, threads, shared)
		p.call(cuapi.IDOccupancyMaxActiveBlocksPerMultiprocessor, fmt.Sprint(p.names[uint64(f)], " ", threads, " ", shared), r, *n)
		return
	}
	block, limit := new(int32), oneOf[int32](p, 0, 128, 2000, mostly[int32](p, 0, -1))
	r := p.OccupancyMaxPotentialBlockSize(n, block, f, 0, shared, limit)
	p.call(cuapi.IDOccupancyMaxPotentialBlockSize, fmt.Sprint(p.names[uint64(f)], " ", shared, " ", limit), r, *n, *block)
}

func (p *player) launchAny() {
	if len(p.funcs) < 3 {
		return
	}
	s := p.stream()
	grid, threads, shared := mostly[uint32](p, 300, 0, 1<<31), mostly[uint32](p, 256, 1, 1024, 0, 1025, 1<<20), mostly[uint32](p, 0, 1024, 48<<10, 48<<10+1, 1<<20)
	by, bz := mostly[uint32](p, 1, 0, 2, 8, 65), mostly[uint32](p, 1, 0, 2, 65)
	a, b := p.block(deviceBlock, poolBlock, managedBlock), p.block(deviceBlock, poolBlock, managedBlock, hostBlock)
	if a == nil || b == nil || a == b || !p.behind(a, s) || !p.behind(b, s) {
		return
	}
	dims := fmt.Sprintf("%d, %d, %d, %d, %d, %s", grid, threads, by, bz, shared, s.name)
	var r cuapi.Result
	switch p.rng.IntN(8) {
	case 0:
		r = p.call(cuapi.IDLaunchKernel, "nop, "+dims, p.LaunchKernel(p.funcs[2], grid, 1, 1, threads, by, bz, shared, s.h, nil, nil))
		p.used(s, r)
	case 1:
		p.call(cuapi.IDLaunchKernel, "0, "+dims, p.LaunchKernel(0, grid, 1, 1, threads, by, bz, shared, s.h, nil, nil))
	case 2:
		p.call(cuapi.IDLaunchKernel, "fill without arguments, "+dims, p.LaunchKernel(p.funcs[0], grid, 1, 1, threads, by, bz, shared, s.h, nil, nil))
	case 3, 4:
		by, bz = 1, 1
		threads, grid = 256, 300
		n := uint64(min(a.size, b.size) / 4)
		args := []cuapi.HostPtr{cuapi.Word(uint64(a.at)), cuapi.Word(uint64(b.at)), cuapi.Word(0x40000000), cuapi.Word(n), nil} // by 2
		if a.at%4 != 0 || b.at%4 != 0 {
			return
		}
		r = p.call(cuapi.IDLaunchKernel, fmt.Sprintf("scale %s %s %d, %s", a.value, b.value, n, s.name), p.LaunchKernel(p.funcs[1], grid, 1, 1, threads, 1, 1, 0, s.h, &args[0], nil))
		p.used(s, r, a, b)
	default:
		n := uint64(a.size / 4)
		args := []cuapi.HostPtr{cuapi.Word(uint64(a.at)), cuapi.Word(uint64(p.rng.Uint32())), cuapi.Word(n), nil}
		if by*bz != 1 && threads < 1024 || threads != 256 {
			n = 0 // the kernel counts one dimension, and not all words
			args[2] = cuapi.Word(0)
		}
		r = p.call(cuapi.IDLaunchKernel, fmt.Sprintf("fill %s %d, %s", a.value, n, dims), p.LaunchKernel(p.funcs[0], grid, 1, 1, threads, by, bz, shared, s.h, &args[0], nil))
		p.used(s, r, a)
	}
}
