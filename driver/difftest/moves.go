package difftest

import (
	"fmt"
	"strings"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// moves are the steps of a sequence. Arguments are right mostly, and wrong in
// ways that the reference names.
var moves = []move{
	{4, true, (*player).askDevice},
	{3, true, (*player).askContext},
	{3, true, (*player).setContext},
	{2, true, (*player).askError},
	{4, true, func(p *player) { p.newStream(oneOf[uint32](p, 0, 1, 1, 1, mostly[uint32](p, 1, 2, 0xFF))) }},
	{2, true, (*player).newPriority},
	{4, true, (*player).askStream},
	{6, true, (*player).waitStream},
	{2, true, (*player).dropStream},
	{4, true, func(p *player) {
		p.newEvent(oneOf[uint32](p, 0, 1, 2, 2, 3, mostly[uint32](p, 2, 4, 6, 8, 0x10, 0xFF)))
	}},
	{8, true, (*player).record},
	{8, true, (*player).waitEvent},
	{6, true, (*player).askEvent},
	{3, true, (*player).elapsed},
	{2, true, (*player).dropEvent},
	{5, true, func(p *player) {
		p.newDevice(oneOf[uintptr](p, 1, 7, 512, 4096, 70000, mostly(p, 64, 0, p.most())))
	}},
	{3, true, func(p *player) { p.newHost(oneOf[uintptr](p, 1, 7, 512, 4096, 70000)) }},
	{2, false, (*player).newManaged},
	{6, true, (*player).newFromPool},
	{5, true, (*player).freeAsync},
	{4, false, (*player).freeAny},
	{3, false, (*player).freeWrong},
	{4, true, (*player).pool},
	{5, true, (*player).poolAttributes},
	{3, false, (*player).poolAccess},
	{10, true, (*player).upload},
	{10, true, (*player).download},
	{10, true, (*player).copyAny},
	{8, true, (*player).fill},
	{4, true, (*player).writeHost},
	{5, true, (*player).flag},
	{6, true, (*player).askPointer},
	{3, false, (*player).loadModule},
	{3, false, (*player).askModule},
	{4, true, (*player).askFunction},
	{4, true, (*player).occupancy},
	{12, true, (*player).launchAny},
	{4, true, (*player).beginCapture},
	{6, true, func(p *player) { p.endCapture(p.stream()) }},
	{2, true, func(p *player) { p.asked(p.stream()) }},
	{2, true, func(p *player) {
		p.mode = true
		p.exchange(oneOf[int32](p, 0, 1, 2))
	}},
	{4, true, (*player).hold},
	{5, true, (*player).release},
}

func (p *player) askDevice() {
	v := new(int32)
	dev := mostly[cuapi.Device](p, 0, -1, 99)
	switch p.rng.IntN(5) {
	case 0:
		n := mostly[int32](p, 0, -1, 99)
		p.call(cuapi.IDDeviceGet, fmt.Sprint(n), p.DeviceGet(&dev, n), dev)
	case 1:
		attr := oneOf[int32](p, 1, 2, 3, 4, 5, 6, 7, 8, 10, 16, 18, 19, 20, 31, 39, 40, 41, 75, 76, 83, 97, 115, mostly[int32](p, 41, 0, -1, 100000))
		r := p.DeviceGetAttribute(v, attr, dev)
		p.call(cuapi.IDDeviceGetAttribute, fmt.Sprintf("%d, %d", attr, dev), r, *v)
	case 2:
		n := oneOf[int32](p, 1, 5, 100)
		name := make([]byte, 100)
		p.call(cuapi.IDDeviceGetName, fmt.Sprintf("%d, %d", n, dev), p.DeviceGetName(&name[0], n, dev))
	case 3:
		if p.held != nil {
			return // never measured beside a held stream
		}
		peer := mostly[cuapi.Device](p, 0, -1, 99)
		r := p.DeviceCanAccessPeer(v, dev, peer)
		p.call(cuapi.IDDeviceCanAccessPeer, fmt.Sprintf("%d, %d", dev, peer), r, *v)
	default:
		active, flags := new(int32), new(uint32)
		r := p.DevicePrimaryCtxGetState(dev, flags, active)
		p.call(cuapi.IDDevicePrimaryCtxGetState, fmt.Sprint(dev), r, *active)
	}
}

func (p *player) askContext() {
	n := p.rng.IntN(5)
	if p.held != nil && (n == 2 || n == 3) {
		return // never measured beside a held stream
	}
	switch n {
	case 0:
		c := new(cuapi.Context)
		r := p.CtxGetCurrent(c)
		p.call(cuapi.IDCtxGetCurrent, "", r, *c == p.core.Raw, *c == 0)
	case 1:
		id := new(uint64)
		h := mostly(p, p.core.Raw, 0)
		r := p.CtxGetId(h, id)
		p.call(cuapi.IDCtxGetId, fmt.Sprint(h != 0), r, *id != 0)
	case 2:
		h := mostly(p, p.core.Raw, 0)
		flags := mostly[uint32](p, 0, 1)
		p.call(cuapi.IDCtxEnablePeerAccess, fmt.Sprint(h != 0, flags), p.CtxEnablePeerAccess(h, flags))
	case 3:
		h := mostly(p, p.core.Raw, 0)
		p.call(cuapi.IDCtxDisablePeerAccess, fmt.Sprint(h != 0), p.CtxDisablePeerAccess(h))
	default:
		dev := mostly[cuapi.Device](p, 0, -1, 99)
		c := new(cuapi.Context)
		if p.call(cuapi.IDDevicePrimaryCtxRetain, fmt.Sprint(dev), p.DevicePrimaryCtxRetain(c, dev)) == cuapi.Success {
			p.call(cuapi.IDDevicePrimaryCtxRelease, fmt.Sprint(dev), p.DevicePrimaryCtxRelease(dev))
		}
	}
}

// setContext has the context current, or none.
func (p *player) setContext() {
	switch p.rng.IntN(4) {
	case 0:
		h := oneOf(p, p.core.Raw, 0)
		if p.call(cuapi.IDCtxSetCurrent, fmt.Sprint(h != 0), p.CtxSetCurrent(h)) == cuapi.Success {
			if h == 0 && p.stack > 0 {
				p.stack--
			} else if h != 0 && p.stack == 0 {
				p.stack = 1
			}
		}
	case 1:
		h := mostly(p, p.core.Raw, 0)
		if p.stack < 4 && p.call(cuapi.IDCtxPushCurrent, fmt.Sprint(h != 0), p.CtxPushCurrent(h)) == cuapi.Success {
			p.stack++
		}
	case 2:
		c := new(cuapi.Context)
		r := p.CtxPopCurrent(c)
		if p.call(cuapi.IDCtxPopCurrent, "", r, *c == p.core.Raw, *c == 0) == cuapi.Success {
			p.stack--
		}
	default: // so that most moves have one
		if p.call(cuapi.IDCtxSetCurrent, "true", p.CtxSetCurrent(p.core.Raw)) == cuapi.Success && p.stack == 0 {
			p.stack = 1
		}
	}
}

func (p *player) askError() {
	code := oneOf[cuapi.Result](p, 0, 1, 2, 3, 4, 34, 46, 100, 101, 200, 201, 209, 214, 215, 217, 218, 220, 222, 400, 401, 500, 600, 700, 701, 702,
		704, 705, 708, 709, 710, 711, 712, 713, 714, 715, 716, 717, 718, 719, 720, 721, 800, 801, 802, 803, 900, 901, 902, 903, 904, 905, 906, 907, 908, 999, -5, 99999)
	s := new(*byte)
	if p.rng.IntN(2) == 0 {
		r := p.GetErrorName(code, s)
		p.call(cuapi.IDGetErrorName, fmt.Sprint(int(code)), r, cuapi.CString(*s))
		return
	}
	r := p.GetErrorString(code, s)
	text, _, _ := strings.Cut(cuapi.CString(*s), " (simulated driver: ") // which it adds
	p.call(cuapi.IDGetErrorString, fmt.Sprint(int(code)), r, text)
}
