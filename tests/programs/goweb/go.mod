module kip.test/goweb

go 1.19
